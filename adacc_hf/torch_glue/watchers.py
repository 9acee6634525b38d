"""Patches of other packages: inside a `with` block, or while a watcher (a callback of one thread) is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, Generic, TypeVar

Watcher = TypeVar("Watcher")
Patch = tuple[Any, str, Any]
"""(owner, name, value) of an attribute of a class or module, and the value that replaces it."""


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace attributes inside the `with` block, unless they do not exist."""
    existing = [(owner, name, value) for owner, name, value in patches if name in vars(owner)]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in existing]
    try:
        for owner, name, value in existing:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class Watchers(Generic[Watcher]):
    """Watchers for one patched function of torch, which gets the calling thread's watcher from `current()`. The patch
    is applied while there is any watcher. Dynamo may keep the patched function, and call it afterwards."""

    def __init__(self, apply_patch: Callable[[], Callable[[], None]]) -> None:
        """Initialize. `apply_patch` must apply the patch, and return a function that removes the patch."""
        self._apply_patch = apply_patch
        self._undo_patch: Callable[[], None]
        self._lock = Lock()
        self._by_thread: dict[int, list[Watcher]] = {}  # by thread id, the innermost watcher last

    def current(self) -> Watcher | None:
        """Return the calling thread's innermost watcher, or None."""
        watchers = self._by_thread.get(get_ident())
        return watchers[-1] if watchers else None

    def begin(self, watcher: Watcher) -> None:
        """Register `watcher`, a callback, for the calling thread until `end` is called."""
        with self._lock:
            if not self._by_thread:
                self._undo_patch = self._apply_patch()
            self._by_thread.setdefault(get_ident(), []).append(watcher)

    def end(self) -> None:
        """Remove the innermost watcher (callback) of the calling thread."""
        with self._lock:
            watchers = self._by_thread[get_ident()]
            watchers.pop()
            if not watchers:
                del self._by_thread[get_ident()]
            if not self._by_thread:
                self._undo_patch()

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        """Register `watcher`, a callback, for the calling thread inside the `with` block."""
        self.begin(watcher)
        try:
            yield
        finally:
            self.end()
