"""Clocks for benchmarks: wall time, or CPU time of this process for a machine that other users share."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}
