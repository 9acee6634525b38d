"""Clocks for benchmarks: wall time, or CPU time of this process for a machine that other users share."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

from adacc_hf.reports.run_record import Settings


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the clock."""
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu counts CPU time without waiting: for one thread on a CPU that is shared with others",
    )


def check_clock(clock: str, settings: Settings) -> None:
    """Raise ValueError if CPU time differs from the elapsed time: with several threads, or on another device."""
    if clock == "cpu" and (settings.threads > 1 or settings.device != "cpu"):
        raise ValueError(
            f"--clock=cpu sums the CPU time of all threads, and does not include other devices: with "
            f"--threads={settings.threads} --device={settings.device} use --clock=wall"
        )
