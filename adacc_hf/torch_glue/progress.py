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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from adacc_hf.torch_glue.distributed import is_first_rank

progress = logging.getLogger("adacc_hf.progress")

SLOW_SECONDS = 3.0  # a phase that holds up training is reported if it takes longer
GROWTH = 4  # factor of a phase's time from one report to the next


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


class SlowReport:
    """Reports of a phase, such as "solving for a policy", that are logged if the phase takes more than SLOW_SECONDS.

    Reports are logged while the phase lasts, from another thread, and once more at its end.
    """

    def __init__(self, phase: str) -> None:
        self._phase, self._started, self._ended = phase, time.monotonic(), threading.Event()
        self._is_slow = False
        self._thread: threading.Thread | None = None
        if is_first_rank():
            self._thread = threading.Thread(target=self._report, args=(SLOW_SECONDS,), daemon=True)
            self._thread.start()

    def _report(self, seconds: float) -> None:
        while not self._ended.wait(max(0.0, self._started + seconds - time.monotonic())):
            progress.info("Adacc: %s: %.0f s so far", self._phase, seconds)
            self._is_slow = True
            seconds *= GROWTH

    def end(self, has_failed: bool = False) -> None:
        """End the reports. If the phase was slow, log its time and outcome. Further calls have no effect."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._is_slow:
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
