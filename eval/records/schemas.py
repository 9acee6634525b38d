"""Check of records: their structure by the types of dataclasses, and figures by their names.

All runners share one vocabulary: a name that ends in _bytes is a count of bytes, in _ms a time, and so on. A missing
figure is noticed when the table is rendered from the record.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.records.records import Status
from adacc_hf.reports.run_record import Conditions, Settings, Spread

Count = NewType("Count", int)
"""Whole number of 0 or more."""
Counts = Count | None | list[Count]
Measured = float | Spread | None | list[float | Spread]
Text = str | None

NAMES: dict[str, Any] = {
    "_bytes$|^num_": Counts,
    "_ms$|_seconds$|_percent$|_ratio$|_loss$|_error$": Measured,
    "^(tokens_per_second|relative_throughput)$": Spread,
    "^(seconds|acc)$": float,
    "^actions$": dict[str, Count],
    "^reason$": str,
    "^(moment|promise|reference|folder|title)$": Text,
    "curve$": list[tuple[Count, float]],
}
"""Types of figures, by patterns of their names."""

STATUSES = [status.value for status in Status]
PARTS = {"run_info", "train_info", "meta_info"}


def check_record(content: Any) -> None:
    """Raise a RecordError that names the place, if the record lacks the structure of runner records."""
    # Runners of lm-eval's tasks add `results`.
    if not isinstance(content, dict) or content.keys() - {"results"} != PARTS:
        raise RecordError(f"a record must have exactly {', '.join(sorted(PARTS))}")
    settings, conditions = content["run_info"], content["meta_info"]
    types = get_type_hints(Settings)
    for name in ("runner", "seed", "threads", "device"):
        _check(settings.get(name), types[name], f"run_info.{name}")
    _check(conditions, Conditions, "meta_info")
    if conditions["status"] != "complete" or not re.fullmatch("[0-9a-f]{40}", conditions["commit"] or "0" * 40):
        raise RecordError("meta_info: the record must be complete, and its commit a hash of git")
    points = content["train_info"].get("points")
    if not isinstance(points, dict) or not points:
        raise RecordError("train_info.points must have at least one point")
    _check_figures(content["train_info"], "train_info")


def _check_figures(figures: Any, place: str) -> None:
    """Check the figures of a mapping or a list, and of all that it contains."""
    if isinstance(figures, list):
        for number, item in enumerate(figures):
            _check_figures(item, f"{place}[{number}]")
    if not isinstance(figures, dict):
        return
    for name, value in figures.items():
        types = [kind for pattern, kind in NAMES.items() if re.search(pattern, name)]
        for kind in types:
            _check(value, kind, f"{place}.{name}")
        if not types:
            _check_figures(value, f"{place}.{name}")
    if "status" in figures:
        status = figures["status"]
        if status not in STATUSES or (status == Status.MEASURED.value) == ("reason" in figures):
            raise RecordError(f"{place}: a measured point has no reason, any other point has one")


def _check(value: Any, kind: Any, place: str) -> None:
    if not fits(value, kind):
        raise RecordError(f"{place} must be {getattr(kind, '__name__', kind)}, not {str(value)[:80]}")


def fits(value: Any, kind: Any) -> bool:
    """Return True if `value`, read from JSON, fits the type `kind`: a dataclass, a union, a container or a plain
    type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, parts[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(fits(item, parts[0]) for item in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(parts) and all(map(fits, value, parts))
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return isinstance(value, dict) and value.keys() == types.keys() and all(fits(value[n], types[n]) for n in types)
    if kind is Count:
        return fits(value, int) and value >= 0
    allowed = (int, float) if kind is float else kind
    return isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
