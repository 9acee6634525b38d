"""Watchers of what a thread runs, called from a patch of torch that stands only while some thread watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Generic, TypeVar

Watcher = TypeVar("Watcher")


class Watchers(Generic[Watcher]):
    """The watchers of all threads behind one patch. The patch asks for `current()`, its own thread's.

    The first watcher applies the patch, the last one undoes it. Code that keeps a patched function meanwhile, as Dynamo
    does when it is first used, finds no watcher later.
    """

    def __init__(self, apply_patch: Callable[[], Callable[[], None]]) -> None:
        """`apply_patch` returns the function that undoes the patch."""
        self._apply_patch = apply_patch
        self._undo_patch: Callable[[], None]
        self._lock = Lock()
        self._by_thread: dict[int, list[Watcher]] = {}
        """By thread; the innermost watcher comes last."""

    def current(self) -> Watcher | None:
        """Return the innermost watcher of the thread that asks, or None."""
        watchers = self._by_thread.get(get_ident())
        return watchers[-1] if watchers else None

    def begin(self, watcher: Watcher) -> None:
        """Have `watcher` watch this thread until `end`."""
        with self._lock:
            if not self._by_thread:
                self._undo_patch = self._apply_patch()
            self._by_thread.setdefault(get_ident(), []).append(watcher)

    def end(self) -> None:
        """Take the innermost watcher of this thread off."""
        with self._lock:
            watchers = self._by_thread[get_ident()]
            watchers.pop()
            if not watchers:
                del self._by_thread[get_ident()]
            if not self._by_thread:
                self._undo_patch()

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        """While open, `watcher` watches this thread."""
        self.begin(watcher)
        try:
            yield
        finally:
            self.end()
