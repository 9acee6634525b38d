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
from typing import Any

from tqdm import tqdm

from adacc_hf.torch_glue.distributed import is_first_rank

progress = logging.getLogger("adacc_hf.progress")

SLOW_SECONDS = 3.0  # a phase that holds up training is reported if it takes longer


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
    """Report of a phase, such as "solving for a policy", that takes more than SLOW_SECONDS: one line after this time,
    logged from another thread, and one at the phase's end. A `with` block ends the phase, or `end`."""

    def __init__(self, phase: str) -> None:
        self._phase, self._started, self._is_slow = phase, time.monotonic(), False
        self._timer = threading.Timer(SLOW_SECONDS, self._begin)
        self._timer.daemon = True
        if is_first_rank():
            self._timer.start()

    def _begin(self) -> None:
        progress.info("Adacc: %s takes more than %.0f s", self._phase, SLOW_SECONDS)
        self._is_slow = True

    def end(self, has_failed: bool = False) -> None:
        """End the phase. If it was slow, log its time and outcome."""
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        if self._is_slow:
            outcome = "failed" if has_failed else "done"
            progress.info("Adacc: %s: %s after %.0f s", self._phase, outcome, time.monotonic() - self._started)

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, *_: object) -> None:
        self.end(has_failed=error_type is not None)


reported_if_slow = SlowReport
