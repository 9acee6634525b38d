"""Records of experiments: settings, results, and the machine, date and software versions of the measurement."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from adacc_hf.artifacts.files import __version__
from adacc_hf.price.timing import processor_names

ROOT = Path(__file__).resolve().parents[2]
"""Root of the source checkout. In an installed package, this folder is not a checkout and has no setup.cfg."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Spread of repeated measurements, as the 20th, 50th and 80th percentile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of `samples`, which must not be empty."""
        if len(samples) == 1:
            return cls(low=samples[0], median=samples[0], high=samples[0])
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(low=fifths[0], median=statistics.median(samples), high=fifths[3])

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all experiments have in common."""

    runner: str
    """Name of the experiment, stored in the experiment's record."""
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    notes: str = ""
    """Free text for the record, for example the state of the machine."""
    output: Path
    until: float = math.inf
    """Deadline of the run, as a time of `time.monotonic`."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Machine, date and software versions of a measurement, stored in the experiment's record."""

    status: str
    date: str
    commit: str | None
    uncommitted_changes: bool | None
    device: str
    seeds: list[int]
    versions: dict[str, str]
    notes: str


def make_record(
    settings: Settings, run_info: dict[str, Any], train_info: dict[str, Any], status: str
) -> dict[str, Any]:
    """Return the record of an experiment as a dict that JSON can store, with the machine, date and software versions of
    this process.

    `settings` contains the settings that all experiments have in common, `run_info` the other settings of this
    experiment, and `train_info` its results. `status` is "complete", or "running" while results are missing.
    """
    cores = processor_names()
    changes = _git_output("status", "--porcelain", "-uno")
    conditions = Conditions(
        status=status,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=_git_output("rev-parse", "HEAD"),
        uncommitted_changes=None if changes is None else bool(changes),
        device=torch.cuda.get_device_name() if settings.device == "cuda" else f"{cores[0]}, {len(cores)} cores",
        seeds=[settings.seed],
        versions={
            "adacc_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        notes=settings.notes,
    )
    shared = {name: value for name, value in asdict(settings).items() if name not in ("output", "notes", "until")}
    return {
        "run_info": {**shared, **run_info},
        "train_info": to_json(train_info),
        "meta_info": asdict(conditions),
    }


def to_json(figures: Any) -> Any:
    """Return `figures`, the results of an experiment, with all dataclasses such as Spread converted to dicts."""
    if is_dataclass(figures) and not isinstance(figures, type):
        return asdict(figures)
    if isinstance(figures, Mapping):
        return {name: to_json(value) for name, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return [to_json(value) for value in figures]
    return figures


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Return the rows as a Markdown table. The first column is left-aligned, and all other columns right-aligned."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first = next(iter(widths))
    lines = [{name: name for name in widths}]
    lines.append({name: "-" * width if name == first else "-" * (width - 1) + ":" for name, width in widths.items()})
    lines += rows
    align = {name: str.ljust if name == first else str.rjust for name in widths}
    return "\n".join(
        f"| {' | '.join(align[name](line[name], width) for name, width in widths.items())} |" for line in lines
    )


def _git_output(*arguments: str) -> str | None:
    """Return the output of git in the source checkout, or None if there is no checkout or no git."""
    if not (ROOT / "setup.cfg").is_file():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
