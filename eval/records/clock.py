"""The clocks that a bench may read: the wall's, or the CPU time of this process, for a machine that others use too."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

from adacc_hf.reports.run_record import Settings


def cpu_seconds() -> float:
    """What this process and those it has waited for have computed so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add the option that picks the clock."""
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu counts what was computed, not what was waited for: for one thread on a CPU shared with others",
    )


def check_clock(clock: str, settings: Settings) -> None:
    """Raise ValueError where time on the CPU is not the time that something took."""
    if clock == "cpu" and (settings.threads > 1 or settings.device != "cpu"):
        raise ValueError(
            f"--clock=cpu adds up what all threads compute and knows nothing of other devices: with "
            f"--threads={settings.threads} --device={settings.device} use --clock=wall"
        )
