"""Messages on the progress of a run, shown on stderr even if the program does not configure logging.

By default, Python shows only a library's warnings. The logger `adacc_hf.progress` also shows a few lines of
information: when profiling starts, when a policy is set or changed, how much of the run followed the policy, and why
training stands still for more than a few seconds. To switch these messages off, set the logger's level:
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
"""Time after which a phase that holds up training, such as profiling, is reported. A shorter one needs no
explanation."""
GROWTH = 4
"""Factor by which the time of a phase grows from one report of the phase to the next, so that a long phase logs few
reports."""


PROFILING, SOLVING = "profiling", "solving"
"""Names of the two kinds of interruptions (periods in which training waits for other work). A wait for the solver
counts as SOLVING."""
MAX_INTERRUPTIONS = 64
"""Number of interruptions (periods in which training waited for other work) that a thread remembers, the latest ones. A
step has fewer."""


class Interruption(NamedTuple):
    """Period in which training waited for other work: the name of the work (PROFILING or SOLVING), the start as
    `time.perf_counter()`, and the duration in seconds."""

    kind: str
    started: float
    seconds: float


class _LatestInterruptions(threading.local):
    """Latest interruptions of training by profiling or solving, recorded per thread.

    A solver on another thread does not interrupt the training thread, so its work must not be counted there.
    """

    def __init__(self) -> None:
        self.interruptions: deque[Interruption] = deque(maxlen=MAX_INTERRUPTIONS)


_remembered = _LatestInterruptions()


class _StderrHandler(logging.Handler):
    """Handler that writes to stderr, unless the program has given the root logger or the logger "adacc_hf" a
    handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not logging.getLogger("adacc_hf").handlers:
            tqdm.write(self.format(record), file=sys.stderr)  # above a progress bar, not into it


progress.setLevel(logging.INFO)
progress.addHandler(_StderrHandler())


def announce(text: str, *details: Any) -> None:
    """Log a progress message on the first rank. `text` is a %-format string for `details`."""
    if is_first_rank():
        progress.info(text, *details)


@contextmanager
def interruption(kind: str, phase: str) -> Iterator[None]:
    """Time the work in the `with` block, for which training waits. If the work is slow, report it under the name
    `phase`.

    `kind` is PROFILING or SOLVING. `interruptions_since` returns how long the work took.
    """
    started = time.perf_counter()
    try:
        with reported_if_slow(phase):
            yield
    finally:
        _remembered.interruptions.append(Interruption(kind, started, time.perf_counter() - started))


def interruptions_since(started: float) -> list[Interruption]:
    """Return the work (profiling or solving) that training on this thread has waited for, if it began at `started` or
    later.

    `started` is a value of `time.perf_counter()`.
    """
    return [interruption for interruption in _remembered.interruptions if interruption.started >= started]


class SlowReport:
    """Reports of a phase, such as "solving for a policy", that are logged if the phase takes more than SLOW_SECONDS.

    Reports are logged while the phase lasts, from another thread, and once more at its end. If `normal_seconds` is more
    than SLOW_SECONDS, the first report is logged after `normal_seconds`.
    """

    def __init__(self, phase: str, normal_seconds: float = 0.0) -> None:
        self._phase, self._started, self._ended = phase, time.monotonic(), threading.Event()
        self._reports: list[float] = []
        first = max(SLOW_SECONDS, normal_seconds)
        arguments = (phase, self._started, first, self._ended, self._reports)
        self._thread = (
            threading.Thread(target=_report_progress, args=arguments, daemon=True) if is_first_rank() else None
        )
        if self._thread is not None:
            self._thread.start()

    def end(self, has_failed: bool = False) -> None:
        """End the reports. If the phase was reported as slow, log the time that it took, and that it is done or has
        failed.

        Further calls have no effect.
        """
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._reports:
            outcome = "failed" if has_failed else "done"
            progress.info("Adacc: %s: %s after %.0f s", self._phase, outcome, time.monotonic() - self._started)


@contextmanager
def reported_if_slow(phase: str) -> Iterator[None]:
    """Log reports of the work in the `with` block, under the name `phase`, if the work is slow (`SlowReport`)."""
    report = SlowReport(phase)
    try:
        yield
    except BaseException:
        report.end(has_failed=True)
        raise
    report.end()


def _report_progress(phase: str, started: float, first: float, ended: threading.Event, reports: list[float]) -> None:
    """Log that `phase` is running, first after `first` seconds and then at growing intervals, until `ended` is set. The
    times of the reports, in seconds since `started`, are appended to `reports`."""
    seconds = first
    while not ended.wait(max(0.0, started + seconds - time.monotonic())):
        progress.info("Adacc: %s: %.0f s so far", phase, seconds)
        reports.append(seconds)
        seconds *= GROWTH
