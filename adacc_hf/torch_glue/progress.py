"""Messages on the progress of a run, shown on stderr even if the program does not configure logging.

Python shows only warnings of a library. The logger `adacc_hf.progress` shows a few lines of information too: when
profiling starts, when a policy is set or changed, how much of the run followed it, and why training stands still for
more than a few seconds. To switch them off, set the logger's level:
`logging.getLogger("adacc_hf.progress").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from adacc_hf.torch_glue.distributed import is_first_rank

progress = logging.getLogger("adacc_hf.progress")

SLOW_SECONDS = 3.0
"""Time after which a phase that interrupts training is reported. A shorter interruption needs no explanation."""
GROWTH = 4
"""Factor between the times of two reports of one phase, so that a long phase has few of them."""


PROFILING, SOLVING = "profiling", "solving"
"""Kinds of interruptions. A wait for the solver is a kind of solving."""
MAX_INTERRUPTIONS = 64
"""Number of latest interruptions that a thread remembers. A step has fewer."""


class Interruption(NamedTuple):
    """Finished interruption of training: its kind, its start as `time.perf_counter()`, and its duration in seconds."""

    kind: str
    started: float
    seconds: float


class _LatestInterruptions(threading.local):
    """Latest interruptions, stored per thread: a solver on another thread does not interrupt training."""

    def __init__(self) -> None:
        self.interruptions: deque[Interruption] = deque(maxlen=MAX_INTERRUPTIONS)


_remembered = _LatestInterruptions()


class _StderrHandler(logging.Handler):
    """Handler that writes to stderr, unless the root logger or the logger "adacc_hf" has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not logging.getLogger("adacc_hf").handlers:
            tqdm.write(self.format(record), file=sys.stderr)  # above a progress bar, not into it


progress.setLevel(logging.INFO)
progress.addHandler(_StderrHandler())


def announce(text: str, *details: Any) -> None:
    """Log a message on the first rank. `text` is a %-format string for `details`."""
    if is_first_rank():
        progress.info(text, *details)


@contextmanager
def interruption(kind: str, phase: str) -> Iterator[None]:
    """Return a context manager for work that training waits for. If the work is slow, it is reported as `phase`.

    `kind` is PROFILING or SOLVING. `interruptions_since` returns how long the work took.
    """
    started = time.perf_counter()
    try:
        with reported_if_slow(phase):
            yield
    finally:
        _remembered.interruptions.append(Interruption(kind, started, time.perf_counter() - started))


def interruptions_since(started: float) -> list[Interruption]:
    """Return the interruptions of this thread that have begun since `started`, a `time.perf_counter()`."""
    return [interruption for interruption in _remembered.interruptions if interruption.started >= started]


@contextmanager
def reported_if_slow(phase: str, normal_seconds: float = 0.0) -> Iterator[None]:
    """Return a context that reports `phase`, such as "solving for a policy", if it takes more than SLOW_SECONDS.

    The report comes while the phase lasts, from another thread, and once more at the phase's end. If `normal_seconds`
    is more than SLOW_SECONDS, the first report comes after this time.
    """
    if not is_first_rank():
        yield
        return
    started, ended = time.monotonic(), threading.Event()
    reports: list[float] = []
    first = max(SLOW_SECONDS, normal_seconds)
    thread = threading.Thread(target=_report_progress, args=(phase, started, first, ended, reports), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if reports:
        progress.info("Adacc: %s: done after %.0f s", phase, time.monotonic() - started)


def _report_progress(phase: str, started: float, first: float, ended: threading.Event, reports: list[float]) -> None:
    """Report that `phase` is running: `first` seconds after `started`, and then at growing intervals until `ended` is
    set.

    The times of the reports are appended to `reports`.
    """
    seconds = first
    while not ended.wait(max(0.0, started + seconds - time.monotonic())):
        progress.info("Adacc: %s: %.0f s so far", phase, seconds)
        reports.append(seconds)
        seconds *= GROWTH
