"""The record of a run point by point, so that a run that was cut short goes on where it stopped."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.eval.records.records import Figures, OutOfTimeError, Status
from adacc_hf.reports.run_record import Settings, make_record, to_json

TRIED_AGAIN = (Status.ERROR.value, Status.TIMEOUT.value)
"""What may have been the machine's fault."""


class RecordError(AdaccError, ValueError):
    """A record cannot be continued, or another run writes into its folder."""


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the option that decides what happens to points that are there already."""
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="keep the points that the record holds already; --no-resume measures all anew (default: a record of the "
        "same settings that was cut short is continued)",
    )


class Ledger:
    """The points of one run, each saved as soon as it is there."""

    def __init__(self, settings: Settings, run_info: dict[str, Any], points: dict[str, Figures]) -> None:
        self.settings = settings
        self.run_info = run_info
        self.points = points
        self._longest_s = 0.0
        self.summary: dict[str, Any] = {}
        """What was worked out from the points, by its name in the record."""

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """The ledger of a saved record, to report on. Raises RecordError for another kind of file."""
        record = read_json(path, RecordError, "record")
        if not _is_ledger(record):
            raise RecordError(f"{path} is no record with points: name a JSON file that `adacc eval` wrote")
        info = record["run_info"]
        shared = {name: info[name] for name in ("runner", "seed", "threads", "device")}
        summary = dict(record["train_info"])
        ledger = cls(Settings(**shared, notes=record["meta_info"]["notes"], output=path), info, summary.pop("points"))
        ledger.summary = summary
        return ledger

    def measure(self, key: str, measure: Callable[[], Figures]) -> Figures:
        """The figures of point `key`: those of the record, or new ones.

        Raises OutOfTimeError where they may take longer than the run has left, by the longest point so far.
        """
        if self._is_wanted(key):
            start = time.monotonic()
            if start + self._longest_s > self.settings.until:
                print(f"the time is over before {key}: the same command goes on from there", file=sys.stderr)
                raise OutOfTimeError
            self.points[key] = to_json(measure())
            self._longest_s = max(self._longest_s, time.monotonic() - start)
            self._save("running")
        return self.points[key]

    def _is_wanted(self, key: str) -> bool:
        """Whether a point is missing. Where time is short, one that failed keeps none of the others from their turn."""
        has_time = self.settings.until == math.inf
        return key not in self.points or (has_time and self.points[key].get("status") in TRIED_AGAIN)

    def finish(self, **summary: Any) -> None:
        """Save the whole record, with what was worked out from the points."""
        self.summary = to_json(summary)
        self._save("complete")

    def publish(self, text: str) -> None:
        """Save the report beside the record, and print it."""
        path = self.settings.output
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(f"{text}\nsaved as {path}")

    def _save(self, status: str) -> None:
        record = make_record(self.settings, self.run_info, {"points": self.points, **self.summary}, status)
        write_json(self.settings.output, record)


@contextmanager
def open_ledger(settings: Settings, run_info: dict[str, Any], resume: bool | None) -> Iterator[Ledger]:
    """The ledger of `settings.output`, whose folder is this run's alone until the end.

    Raises RecordError if another run has it, or, with `resume`, if the record there has other settings.
    """
    with locked(settings.output.parent):
        empty = json.loads(json.dumps(make_record(settings, run_info, {"points": {}}, "running")))
        yield Ledger(settings, run_info, _kept_points(settings.output, empty, resume))


def _kept_points(path: Path, empty: dict[str, Any], resume: bool | None) -> dict[str, Figures]:
    """The points of the record at `path` that this run keeps; `empty` is the run's own record without any."""
    if resume is False or not path.is_file():
        return {}
    record = read_json(path, RecordError, "record")
    differing = _differences(record, empty)
    if resume is None and (differing or record["meta_info"]["status"] == "complete"):
        return {}
    if differing:
        raise RecordError(
            f"{path} cannot be continued, because it was measured with another {', '.join(differing)}: "
            f"set what it was measured with, name another --output, or start over with --no-resume"
        )
    return record["train_info"]["points"]


def _differences(record: dict[str, Any], empty: dict[str, Any]) -> list[str]:
    """The settings and conditions in which two records differ."""
    if not _is_ledger(record):
        return ["kind of record"]
    names = sorted(record["run_info"].keys() | empty["run_info"].keys())
    found = [name for name in names if record["run_info"].get(name) != empty["run_info"].get(name)]
    found += [n for n in ("commit", "device", "versions") if record["meta_info"][n] != empty["meta_info"][n]]
    return found


def _is_ledger(record: Any) -> bool:
    parts = {"run_info", "train_info", "meta_info"}
    return isinstance(record, dict) and parts <= record.keys() and "points" in record["train_info"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep `folder` to this process; the lock goes with the process, however it ends. Raises RecordError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(
            f"another run writes into {folder}: wait for its end, or give this one a folder of its own with --output"
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
