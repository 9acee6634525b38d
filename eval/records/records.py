"""Statuses of measurements, and errors of runners."""

from __future__ import annotations

from enum import Enum
from typing import Any

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.run_record import Spread

Figures = dict[str, Any]
"""Results of one measurement."""


class Status(str, Enum):
    """Outcome of a measurement."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    """The device ran out of memory, the counted bytes exceed the limit, or no policy fits the budget."""
    CANNOT_RUN = "cannot_run"
    """A device or package is missing. The reason names it."""
    RED = "red"
    """The gradients are wrong, so nothing was timed."""
    TIMEOUT = "timeout"
    ERROR = "error"


OUT_OF_TIME = 3
"""Exit status of a run whose time is over. The same command continues the run."""


class OutOfTimeError(SystemExit):
    """End of a run whose time is over, with a special exit status."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)


class WrongResultError(AdaccError):
    """Error of a method with wrong results, whose speed means nothing."""


def describe(figures: Figures) -> dict[str, Any]:
    """Return a point's cells for tables: tokens per second and peak, or the status if the point has no figures."""
    speed = figures.get("tokens_per_second")
    peak = figures.get("peak_bytes")
    return {
        "tokens/s": figures["status"].replace("_", " ") if speed is None else Spread(**speed).text(0),
        "peak": "" if peak is None else format_bytes(peak),
    }
