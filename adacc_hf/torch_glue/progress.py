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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from adacc_hf.torch_glue.distributed import is_first_rank

progress = logging.getLogger("adacc_hf.progress")

SLOW_SECONDS = 3.0
"""Time after which a phase that interrupts training is reported. A shorter interruption needs no explanation."""
GROWTH = 4
"""Factor between the times of two reports of one phase, so that a long phase has few of them."""


class _Fallback(logging.Handler):
    """Handler that writes to stderr, unless the root logger or the logger "adacc_hf" has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not logging.getLogger("adacc_hf").handlers:
            tqdm.write(self.format(record), file=sys.stderr)  # above a progress bar, not into it


progress.setLevel(logging.INFO)
progress.addHandler(_Fallback())


def announce(text: str, *details: Any) -> None:
    """Log a message on the first rank. `text` is a %-format string for `details`."""
    if is_first_rank():
        progress.info(text, *details)


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
    thread = threading.Thread(target=_report, args=(phase, started, first, ended, reports), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if reports:
        progress.info("Adacc: %s: done after %.0f s", phase, time.monotonic() - started)


def _report(phase: str, started: float, first: float, ended: threading.Event, reports: list[float]) -> None:
    """Report that `phase` is running: `first` seconds after `started`, and then at growing intervals until `ended` is
    set.

    The times of the reports are appended to `reports`.
    """
    seconds = first
    while not ended.wait(max(0.0, started + seconds - time.monotonic())):
        progress.info("Adacc: %s: %.0f s so far", phase, seconds)
        reports.append(seconds)
        seconds *= GROWTH
