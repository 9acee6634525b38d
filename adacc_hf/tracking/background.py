"""One function at a time on a thread of its own, on the first rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from adacc_hf.ranks import from_first_rank, is_first_rank

T = TypeVar("T")


class Background(Generic[T]):
    """The result of `make`, which starts at once on the first rank.

    All ranks must ask for the result at the same point.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.cpu_ms = 0.0
        """What `make` computed, which training may have had to wait for; known on the first rank once it is done."""
        self._make = make
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if is_first_rank():
            self._thread = threading.Thread(target=self._run, name="adacc-solver")
            self._thread.start()

    def result(self) -> T:
        """What `make` returned, on every rank; waits for it. Its error is raised everywhere."""
        return from_first_rank(self._joined)

    def _run(self) -> None:
        started = time.thread_time()
        try:
            self._made.append(self._make())
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        self.cpu_ms = (time.thread_time() - started) * 1e3

    def _joined(self) -> Any:
        assert self._thread is not None, "only the first rank makes"
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made[0]
