"""Published measurements by others: rows of data, their sources, and the half that is held out from planner work.

`rows.json` has the measurements of memory, and `speeds.json` pairs of speeds. Both record what each source leaves
unsaid, and the assumptions that were made before any prediction. `second_look.json` lists assumptions about whole
sources that the measured code proved wrong: their rows are predicted once more, and both predictions are reported.
`undecidable.json` has measurements that no assumption can complete, or whose settings the planner does not have.
`models.json` has the architectures, `sources.json` the addresses, and `remains.json` the causes of remaining errors.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

FOLDER = Path(__file__).parent
UNITS = {"GB": 10**9, "GiB": 2**30, "MB of 2^20": 2**20}
"""Bytes per unit of a published figure."""
HELD_OUT_SEED = 32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of a training: the model and how it was trained."""

    model: str
    precision: str
    """Value of `adacc plan --dtype`."""
    optimizer: str
    batch: int
    """Sequences per device and step, or per micro-batch if gradients are accumulated."""
    length: int
    device: str
    sharding: str
    devices: int
    checkpointing: str
    """none, or full: torch's checkpoint around every block. Pairs of speeds have further modes (prediction.py)."""
    attention: str
    head: str
    """plain: the model's own loss. chunked: the whole logits never exist at once."""
    lora: dict[str, Any] | None
    compact_rank: float | None
    accumulates: bool
    older: list[str]
    """Behaviours of torch or Transformers in the measured version that have changed since (prediction.py)."""


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """One published measurement of memory."""

    name: str
    source: str
    figure: float
    unit: str
    meter: str
    """Memory counter: allocated (live tensors), active (live tensors, by another counter of torch's allocator),
    reserved (bytes kept by the allocator), or nvidia-smi (bytes seen by the driver)."""
    context_mb: float
    """Bytes that the driver counts beyond the allocator's, in units of 2^20 bytes."""
    not_said: list[str]
    """Settings that the source does not give."""
    assumed: list[str]
    """Values assumed for these settings, before looking at a prediction."""
    set_aside: str | None
    """Reason why the row is undecidable after all, independent of the prediction. The prediction is reported and not
    counted."""

    @property
    def measured_bytes(self) -> int:
        return round(self.figure * UNITS[self.unit])

    @property
    def counts_live_bytes(self) -> bool:
        """Return True if the meter counts live tensors, False if it counts bytes that the allocator keeps."""
        return self.meter in ("allocated", "active")

    @property
    def context_bytes(self) -> int:
        return round(self.context_mb * 2**20)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One of the two runs of a pair."""

    checkpointing: str
    batch: int
    length: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two published speeds of one setting, under two modes of checkpointing."""

    name: str
    source: str
    setting: dict[str, Any]
    """Fields of a `Setting`, except the runs' fields."""
    unit: str
    """Unit of the runs' values. "s" is seconds per step. Any other unit is work per time, where more is faster."""
    base: Run
    other: Run
    not_said: list[str]
    assumed: list[str]
    set_aside: str | None

    @property
    def settings(self) -> tuple[Setting, Setting]:
        """Return the settings of the base run and of the other run."""
        return self._setting_of(self.base), self._setting_of(self.other)

    @property
    def measured(self) -> float:
        """Return the time of the other run divided by the time of the base run, for the same amount of work."""
        if self.unit == "s":
            return self.other.value / self.base.value
        return self.base.value / self.other.value

    def _setting_of(self, run: Run) -> Setting:
        return Setting(**self.setting, checkpointing=run.checkpointing, batch=run.batch, length=run.length)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Publication of measurements."""

    title: str
    url: str
    code: str
    """Origin of the measured model code: Transformers, or other code, which may save different tensors."""


@dataclass(frozen=True, kw_only=True)
class SecondLook:
    """Corrections of an assumption about all rows of a source, taken from the measured code."""

    sources: list[str]
    models: list[str] | None
    """Models whose rows are corrected, or None for all."""
    changes: dict[str, Any]
    """New values by field of the row. A field `lora.NAME` is in the row's `lora`, and `model.NAME` in the model's
    configuration."""
    reason: str
    url: str

    def is_for(self, row: Row) -> bool:
        return row.source in self.sources and (self.models is None or row.model in self.models)


@dataclass(frozen=True, kw_only=True)
class Undecidable:
    """Measurement that cannot be predicted, with the reason."""

    name: str
    source: str
    figure: str
    reason: str


@cache
def rows() -> dict[str, Row]:
    """Return all predictable measurements by name, in the order of their file."""
    measurements = [Row(**_check_fields(record, Row)) for record in _read("rows.json")]
    return {row.name: row for row in measurements}


@cache
def pairs() -> dict[str, Pair]:
    """Return all pairs of speeds by name, in the order of their file."""
    speed_pairs = []
    for record in _read("speeds.json"):
        runs = {name: Run(**record[name]) for name in ("base", "other")}
        speed_pairs.append(Pair(**{**_check_fields(record, Pair), **runs}))
    return {pair.name: pair for pair in speed_pairs}


@cache
def remains() -> dict[str, str]:
    """Return the causes of remaining errors, by the name of the row or the pair."""
    return _read("remains.json")


@cache
def sources() -> dict[str, Source]:
    return {name: Source(**record) for name, record in _read("sources.json").items()}


@cache
def second_looks() -> list[SecondLook]:
    return [SecondLook(**record) for record in _read("second_look.json")]


def apply_second_looks(row: Row) -> tuple[Row, dict[str, Any]]:
    """Return `row` with all corrections applied, and the changes to its model's configuration."""
    changes = {name: value for look in second_looks() if look.is_for(row) for name, value in look.changes.items()}
    of_model = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
    of_lora = {name.removeprefix("lora."): value for name, value in changes.items() if name.startswith("lora.")}
    own = {name: value for name, value in changes.items() if "." not in name}
    if of_lora:
        own["lora"] = {**(row.lora or {}), **of_lora}
    return replace(row, **own), of_model


@cache
def undecidable() -> list[Undecidable]:
    return [Undecidable(**record) for record in _read("undecidable.json")]


def model_config(name: str, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """Return the configuration of a model of `models.json`, with `changes`."""
    record = {**_read("models.json")[name], **(changes or {})}
    config_class = getattr(transformers, record.pop("config"))
    return config_class(**record, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def held_out(names: Collection[str]) -> frozenset[str]:
    """Return half of `names`, drawn by a fixed seed. These rows are not looked at while the planner is changed."""
    return frozenset(random.Random(HELD_OUT_SEED).sample(sorted(names), len(names) // 2))


def held_out_pairs() -> frozenset[str]:
    """Return the held-out pairs: pairs of held-out rows, and half of the other pairs, drawn in the same way."""
    others = [name for name in pairs() if name not in rows()]
    return held_out(others) | (held_out(rows()) & pairs().keys())


def _read(file: str) -> Any:
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


def _check_fields(record: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return `record` if its keys are exactly the fields of `kind`. Raise ValueError otherwise."""
    expected = {field.name for field in fields(kind)}
    if record.keys() != expected:
        differing = sorted(record.keys() ^ expected)
        raise ValueError(
            f"row {record.get('name')!r} must have exactly the fields of {kind.__name__}: missing or "
            f"unknown are {', '.join(differing)}"
        )
    return record
