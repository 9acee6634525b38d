"""Registry of watchers per thread, for patches of torch that are applied only while a watcher is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Generic, TypeVar

Watcher = TypeVar("Watcher")


class Watchers(Generic[Watcher]):
    """Watchers of all threads for one patch of torch. The patched function calls `current()` for its thread's watcher.

    The patch is applied when the first watcher begins, and undone when the last one ends. Code may keep a reference to
    the patched function, as Dynamo does at its first use. Later calls of that function get None from `current()`.
    """

    def __init__(self, apply_patch: Callable[[], Callable[[], None]]) -> None:
        """Set the function that applies the patch, and returns the function that undoes the patch."""
        self._apply_patch = apply_patch
        self._undo_patch: Callable[[], None]
        self._lock = Lock()
        self._by_thread: dict[int, list[Watcher]] = {}
        """Watchers by thread id; the innermost one is last."""

    def current(self) -> Watcher | None:
        """Return the innermost watcher of the calling thread, or None."""
        watchers = self._by_thread.get(get_ident())
        return watchers[-1] if watchers else None

    def begin(self, watcher: Watcher) -> None:
        """Register `watcher` for this thread until `end`."""
        with self._lock:
            if not self._by_thread:
                self._undo_patch = self._apply_patch()
            self._by_thread.setdefault(get_ident(), []).append(watcher)

    def end(self) -> None:
        """Remove the innermost watcher of this thread."""
        with self._lock:
            watchers = self._by_thread[get_ident()]
            watchers.pop()
            if not watchers:
                del self._by_thread[get_ident()]
            if not self._by_thread:
                self._undo_patch()

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        """Register `watcher` for this thread until the context ends."""
        self.begin(watcher)
        try:
            yield
        finally:
            self.end()
