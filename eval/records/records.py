"""What every runner leaves in its record: the figures, the settings they were measured with, and where."""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers

import adacc_hf
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes

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


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The 20th, 50th and 80th percentile of something measured several times."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample."""
        if len(samples) == 1:
            return cls(low=samples[0], median=samples[0], high=samples[0])
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(low=fifths[0], median=statistics.median(samples), high=fifths[3])

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all runners share."""

    runner: str
    """The name of what is run, by which its record says what it holds."""
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    notes: str = ""
    """Free text for the record, the state of the machine say."""
    output: Path
    until: float = math.inf
    """By `time.monotonic`, when the run has to be over."""

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Settings:
        """Takes effect at once: torch gets the number of threads. Raises ValueError for a device that is not there."""
        given = {name: getattr(arguments, name) for name in cls.__dataclass_fields__ if name != "until"}
        if given["threads"] is None:
            given["threads"] = 1 if arguments.device == "cpu" else os.cpu_count() or 1
        until = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        settings = cls(**given | {"output": output_path(arguments), "until": until})
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


def make_record(
    settings: Settings, run_info: dict[str, Any], train_info: dict[str, Any], status: str
) -> dict[str, Any]:
    """The record as it is saved; `status` is "complete", or "running" while points are missing."""
    shared = {name: value for name, value in asdict(settings).items() if name not in ("output", "notes", "until")}
    return {
        "run_info": {**shared, **run_info},
        "train_info": to_json(train_info),
        "meta_info": {**meta_info(settings), "status": status},
    }


def to_json(figures: Any) -> Any:
    """`figures` with records such as Spread as plain dicts, all the way down."""
    if is_dataclass(figures) and not isinstance(figures, type):
        return asdict(figures)
    if isinstance(figures, Mapping):
        return {name: to_json(value) for name, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return [to_json(value) for value in figures]
    return figures


def meta_info(settings: Settings) -> dict[str, Any]:
    """Where and when a record was made, and with which versions."""
    return {
        "status": "complete",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if (changed := _git("status", "--porcelain", "-uno")) is None else bool(changed),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else _processor(),
        "seeds": [settings.seed],
        "versions": {
            "adacc_hf": adacc_hf.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "notes": settings.notes,
    }


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as Markdown with aligned columns: the first to the left, the others to the right."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first = next(iter(widths))
    lines = [{name: name for name in widths}]
    lines.append({name: "-" * width if name == first else "-" * (width - 1) + ":" for name, width in widths.items()})
    lines += rows
    align = {name: str.ljust if name == first else str.rjust for name in widths}
    return "\n".join(
        f"| {' | '.join(align[name](line[name], width) for name, width in widths.items())} |" for line in lines
    )


def _git(*arguments: str) -> str | None:
    """The output of git in the source checkout; None where the package is installed without one, or git is missing."""
    root = Path(adacc_hf.__file__).parents[1]
    if not (root / "setup.cfg").is_file():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    """The CPU's name and its number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or 1} cores"


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
