"""Records of runs, saved point by point, so that an interrupted run resumes where it stopped."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.eval.records.records import Figures, OutOfTimeError, Status
from adacc_hf.reports.run_record import Settings, make_record, to_json

RETRIED_STATUSES = (Status.ERROR.value, Status.TIMEOUT.value)
"""Statuses of points that are measured again, because the machine may have caused the failure."""


class RecordError(AdaccError, ValueError):
    """Error of a record that cannot be continued, or of a folder that another run writes to."""


class Ledger:
    """Points of one run, each saved as soon as it is measured."""

    def __init__(self, settings: Settings, run_info: dict[str, Any], points: dict[str, Figures]) -> None:
        self.settings = settings
        self.run_info = run_info
        self.points = points
        self._longest_s = 0.0
        self.summary: dict[str, Any] = {}
        """Figures derived from the points, by their keys in the record."""

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Return the ledger of a saved record, to report on. Raise RecordError for another kind of file."""
        record = read_json(path, RecordError, "record")
        if not _is_ledger(record):
            raise RecordError(f"{path} is not a record with points: pass a JSON file that `adacc eval` wrote")
        info = record["run_info"]
        shared = {name: info[name] for name in ("runner", "seed", "threads", "device")}
        summary = dict(record["train_info"])
        ledger = cls(Settings(**shared, notes=record["meta_info"]["notes"], output=path), info, summary.pop("points"))
        ledger.summary = summary
        return ledger

    def measure(self, key: str, measure: Callable[[], Figures]) -> Figures:
        """Return the figures of point `key` from the record, or measure them.

        Raise OutOfTimeError if the remaining time is shorter than the longest point so far.
        """
        if self._needs_measuring(key):
            start = time.monotonic()
            if start + self._longest_s > self.settings.until:
                print(f"the time is over before {key}: run the same command again to continue", file=sys.stderr)
                raise OutOfTimeError
            self.points[key] = to_json(measure())
            self._longest_s = max(self._longest_s, time.monotonic() - start)
            self._save("running")
        return self.points[key]

    def _needs_measuring(self, key: str) -> bool:
        # In a run with a time limit, failed points are not tried again, so that others get time.
        is_unlimited = self.settings.until == math.inf
        return key not in self.points or (is_unlimited and self.points[key].get("status") in RETRIED_STATUSES)

    def finish(self, **summary: Any) -> None:
        """Save the whole record, with the figures derived from the points."""
        self.summary = to_json(summary)
        self._save("complete")

    def complete(
        self, report: Callable[[Ledger], str], plot: Callable[[Ledger], None] | None = None, **summary: Any
    ) -> None:
        """Save the whole record, its plot and its report."""
        self.finish(**summary)
        if plot is not None:
            plot(self)
        self.publish(report(self))

    def has_status(self, *statuses: Status) -> bool:
        """Return True if any point has one of these statuses."""
        return any(point.get("status") in [status.value for status in statuses] for point in self.points.values())

    def failures(self) -> list[str]:
        """Return one line for each point that failed for reasons other than memory."""
        out_of_memory = (Status.MEASURED.value, Status.OUT_OF_MEMORY.value)
        return [f"{key}: {p['reason']}" for key, p in self.points.items() if p["status"] not in out_of_memory]

    def reasons(self, titles: Mapping[str, str] | None = None) -> list[str]:
        """Return one line for each point that was not measured: its title (or else its key) and the reason."""
        missing = {key: point["reason"] for key, point in self.points.items() if "reason" in point}
        return [f"{(titles or {}).get(key, key)}: {reason}" for key, reason in missing.items()]

    def publish(self, text: str) -> None:
        """Save the report next to the record, and print it."""
        path = self.settings.output
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(f"{text}\nsaved as {path}")

    def _save(self, status: str) -> None:
        record = make_record(self.settings, self.run_info, {"points": self.points, **self.summary}, status)
        write_json(self.settings.output, record)


@contextmanager
def open_ledger(settings: Settings, run_info: dict[str, Any], resume: bool | None) -> Iterator[Ledger]:
    """Open the ledger of `settings.output`, and lock its folder for this run until the end.

    Raise RecordError if another run has locked the folder, or, with `resume`, if the record there has different
    settings.
    """
    with lock_folder(settings.output.parent):
        empty = json.loads(json.dumps(make_record(settings, run_info, {"points": {}}, "running")))
        yield Ledger(settings, run_info, _points_to_keep(settings.output, empty, resume))


def run_points(
    settings: Settings,
    run_info: dict[str, Any],
    resume: bool | None,
    points: Callable[[Ledger], Mapping[str, Callable[[], Figures]]],
    report: Callable[[Ledger], str],
    plot: Callable[[Ledger], None] | None = None,
    summary: Callable[[Ledger], dict[str, Any]] | None = None,
) -> Ledger:
    """Measure the points that a record does not have yet. Save the record, its plot and its report.

    points: function from the ledger to the measurements, by their keys in the record. summary: function from the
    measured ledger to the figures that are derived from its points.
    """
    with open_ledger(settings, run_info, resume) as ledger:
        for key, measure in tqdm(points(ledger).items(), desc=settings.runner, unit="point"):
            ledger.measure(key, measure)
        ledger.complete(report, plot, **(summary(ledger) if summary is not None else {}))
    return ledger


def _points_to_keep(path: Path, empty: dict[str, Any], resume: bool | None) -> dict[str, Figures]:
    """Return the points of the record at `path` that this run keeps. `empty` is this run's record without points."""
    if resume is False or not path.is_file():
        return {}
    record = read_json(path, RecordError, "record")
    differing = _differences(record, empty)
    if resume is None and (differing or record["meta_info"]["status"] == "complete"):
        return {}
    if differing:
        raise RecordError(
            f"{path} cannot be continued, because it was measured with another {', '.join(differing)}: "
            f"use the same settings, pass another --output, or start over with --no-resume"
        )
    return record["train_info"]["points"]


def _differences(record: dict[str, Any], empty: dict[str, Any]) -> list[str]:
    """Return the names of settings and conditions in which two records differ."""
    if not _is_ledger(record):
        return ["kind of record"]
    names = sorted(record["run_info"].keys() | empty["run_info"].keys())
    differing = [name for name in names if record["run_info"].get(name) != empty["run_info"].get(name)]
    conditions = ("commit", "device", "versions")
    return differing + [name for name in conditions if record["meta_info"][name] != empty["meta_info"][name]]


def _is_ledger(record: Any) -> bool:
    parts = {"run_info", "train_info", "meta_info"}
    return isinstance(record, dict) and parts <= record.keys() and "points" in record["train_info"]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` inside the `with` block. Raise RecordError if another process has locked the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(
            f"{folder} is locked by another run, which writes into it: wait for its end, or choose another folder "
            "with --output"
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
