"""Statuses of measurements, errors of runners, and the options for the settings of a record."""

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
"""What one measurement found."""


class Status(str, Enum):
    """How a measurement ended."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    """The device refused, the counted bytes exceed the limit, or no policy fits the budget."""
    CANNOT_RUN = "cannot_run"
    """Something it needs is not here; the reason says what."""
    RED = "red"
    """Its gradients are wrong, so nothing was timed."""
    TIMEOUT = "timeout"
    ERROR = "error"


OUT_OF_TIME = 3
"""The exit status of a run whose time was over; the same command goes on from there."""


class OutOfTimeError(SystemExit):
    """The time that a run was given is over: it ends, with a status of its own."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)


class RedGateError(AdaccError):
    """What is to be measured gives wrong results, so that its speed means nothing."""


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line. They take effect at once: torch gets the number of threads.

    Raises ValueError for a device that is not there.
    """
    given = {name: getattr(arguments, name) for name in Settings.__dataclass_fields__ if name != "until"}
    if given["threads"] is None:
        given["threads"] = 1 if arguments.device == "cpu" else os.cpu_count() or 1
    until = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    settings = Settings(**given | {"output": output_path(arguments), "until": until})
    if settings.threads < 1:
        raise ValueError(f"--threads={settings.threads} must be 1 or more")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda was asked for and torch sees no CUDA device: use --device=cpu")
    torch.set_num_threads(settings.threads)
    return settings


def add_settings(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the shared options of runner `name` to its parser."""
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and dropout")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of torch (default: 1; on a GPU's host all that it has)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no point that may last longer than what is left of so many minutes, and try no failed one again; "
        "the same command goes on from there",
    )
    parser.add_argument("--notes", default="", help="text to keep in the record, the state of the machine say")
    default = DEFAULT_FOLDER / "DEVICE" / f"{name}.json"
    parser.add_argument("--output", type=Path, help=f"the JSON file to write (default: {default})")
    parser.set_defaults(runner=default.stem, record=f"{name}.json")


def output_path(arguments: argparse.Namespace) -> Path:
    """Where the record goes: one that was measured on another device is never in its place by default."""
    return arguments.output or DEFAULT_FOLDER / arguments.device / arguments.record


def positive_int(text: str) -> int:
    """The type of an option that counts something. Raises what argparse reports as a wrong value."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def share_of_what_can_be_won(checkpointing: float, plain: float, ours: float) -> float | None:
    """Return the part of the time between checkpointing and plain training that a method saves; None if there is none.

    1 is plain training's speed, 0 checkpointing's.
    """
    return (checkpointing - ours) / (checkpointing - plain) if checkpointing > plain else None


def describe(figures: Figures) -> dict[str, Any]:
    """The cells that every table shows of a point: tokens per second and peak, or why there are none."""
    speed = figures.get("tokens_per_second")
    peak = figures.get("peak_bytes")
    return {
        "tokens/s": figures["status"].replace("_", " ") if speed is None else Spread(**speed).text(0),
        "peak": "" if peak is None else format_bytes(peak),
    }
