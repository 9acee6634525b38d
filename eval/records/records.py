"""Statuses of measurements, errors of runners, and options for the settings of a record."""

from __future__ import annotations

import argparse
import math
import os
import time
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.run_record import Settings, Spread

DEFAULT_FOLDER = Path("runs/eval")

Figures = dict[str, Any]
"""Results of one measurement."""


class Status(str, Enum):
    """Outcome of a measurement."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    """The device ran out of memory, the counted bytes exceed the limit, or no policy fits the budget."""
    CANNOT_RUN = "cannot_run"
    """A device or package is missing; the reason names it."""
    RED = "red"
    """The gradients are wrong, so nothing was timed."""
    TIMEOUT = "timeout"
    ERROR = "error"


OUT_OF_TIME = 3
"""Exit status of a run whose time is over. The same command continues the run."""


class OutOfTimeError(SystemExit):
    """End of a run whose time is over, with an exit status of its own."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)


class WrongResultError(AdaccError):
    """Error of a method with wrong results, whose speed means nothing."""


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line, and set torch's number of threads.

    Raise ValueError for a device that this machine does not have.
    """
    options = {name: getattr(arguments, name) for name in Settings.__dataclass_fields__ if name != "until"}
    if options["threads"] is None:
        options["threads"] = 1 if arguments.device == "cpu" else os.cpu_count() or 1
    until = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    settings = Settings(**options | {"output": output_path(arguments), "until": until})
    if settings.threads < 1:
        raise ValueError(f"--threads={settings.threads} must be 1 or more")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda, but torch sees no CUDA device: use --device=cpu")
    torch.set_num_threads(settings.threads)
    return settings


def add_settings(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the shared options of runner `name` to its parser."""
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and dropout")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: 1; on a GPU's host all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit: start no point that may take longer than the rest of these minutes, and do not retry failed "
        "points; the same command continues the run",
    )
    parser.add_argument("--notes", default="", help="text for the record, for example the state of the machine")
    default = DEFAULT_FOLDER / "DEVICE" / f"{name}.json"
    parser.add_argument("--output", type=Path, help=f"JSON file to write (default: {default})")
    parser.set_defaults(runner=default.stem, record=f"{name}.json")


def output_path(arguments: argparse.Namespace) -> Path:
    """Return the path of the record. By default it depends on the device, so that records of another device are not
    overwritten."""
    return arguments.output or DEFAULT_FOLDER / arguments.device / arguments.record


def positive_int(text: str) -> int:
    """Parse an option that counts something. Raise the error that argparse reports for a wrong value."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def describe(figures: Figures) -> dict[str, Any]:
    """Return a point's cells for tables: tokens per second and peak, or the status if there are none."""
    speed = figures.get("tokens_per_second")
    peak = figures.get("peak_bytes")
    return {
        "tokens/s": figures["status"].replace("_", " ") if speed is None else Spread(**speed).text(0),
        "peak": "" if peak is None else format_bytes(peak),
    }
