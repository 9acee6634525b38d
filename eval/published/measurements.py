"""What others measured: rows of data, where they stand, and the half of them that is not looked at while mending.

`rows.json` has the measurements of memory and `speeds.json` pairs of speeds, with what each source leaves unsaid and
what was assumed for it before any prediction was made; `second_look.json` where the code that was measured proved an
assumption about a whole source wrong: its rows are predicted once more, and both predictions are told.
`undecidable.json` has what no assumption can complete, or whose settings the planner does not have; `models.json` the
architectures, `sources.json` the addresses and `remains.json` what was found behind the errors that are left.
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
"""Bytes of each unit that a figure is given in."""
METERS = ("allocated", "active", "reserved", "nvidia-smi")
"""Live tensors, the same by another counter of torch's allocator, what that keeps, and what the driver sees."""
HELD_OUT_SEED = 32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was trained how."""

    model: str
    precision: str
    """As `adacc plan --dtype` has it."""
    optimizer: str
    batch: int
    """Sequences per device and step, or per micro-batch where it `accumulates`."""
    length: int
    device: str
    sharding: str
    devices: int
    checkpointing: str
    """none, or full: torch's checkpoint around every block. Of pairs of speeds others too (speed.py)."""
    attention: str
    head: str
    """plain: the model's own loss; chunked: logits are never there as a whole."""
    lora: dict[str, Any] | None
    compact_rank: float | None
    accumulates: bool
    older: list[str]
    """What torch or Transformers did otherwise in the version that was measured (older_versions.py)."""


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """One published measurement of memory."""

    name: str
    source: str
    figure: float
    unit: str
    meter: str
    context_mb: float
    """What the driver counts besides the allocator's bytes, in units of 2^20 bytes."""
    not_said: list[str]
    """What the source leaves open."""
    assumed: list[str]
    """What was taken for that, before looking at a prediction."""
    set_aside: str | None
    """Why it proved undecidable after all, whatever the planner says; its prediction is told and not counted."""

    @property
    def measured_bytes(self) -> int:
        return round(self.figure * UNITS[self.unit])

    @property
    def counts_live_bytes(self) -> bool:
        """Whether the meter counts tensors, not what the allocator keeps for them."""
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
    """A `Setting` but for what its runs have."""
    unit: str
    """Of the runs' values: s of a step, or work in a time, of which more is faster."""
    base: Run
    other: Run
    not_said: list[str]
    assumed: list[str]
    set_aside: str | None

    @property
    def settings(self) -> tuple[Setting, Setting]:
        """Of the base and of the other run."""
        return self._setting_of(self.base), self._setting_of(self.other)

    @property
    def measured(self) -> float:
        """Time of the other run over that of the base, for the same amount of work."""
        if self.unit == "s":
            return self.other.value / self.base.value
        return self.base.value / self.other.value

    def _setting_of(self, run: Run) -> Setting:
        return Setting(**self.setting, checkpointing=run.checkpointing, batch=run.batch, length=run.length)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where measurements stand."""

    title: str
    url: str
    code: str
    """Whose model code was measured: Transformers', or another, which saves other tensors."""


@dataclass(frozen=True, kw_only=True)
class SecondLook:
    """What the measured code does otherwise than was assumed of all rows of a source."""

    sources: list[str]
    models: list[str] | None
    """Only rows of these; None is all."""
    changes: dict[str, Any]
    """New values of members of the row, of its `lora.` or its `model.`."""
    reason: str
    url: str

    def is_for(self, row: Row) -> bool:
        return row.source in self.sources and (self.models is None or row.model in self.models)


@dataclass(frozen=True, kw_only=True)
class Undecidable:
    """A measurement that cannot be predicted, and why."""

    name: str
    source: str
    figure: str
    reason: str


@cache
def rows() -> dict[str, Row]:
    """All measurements that can be predicted, by name, in the order of their file."""
    found = [Row(**_with_all(record, Row)) for record in _read("rows.json")]
    return {row.name: row for row in found}


@cache
def pairs() -> dict[str, Pair]:
    """All pairs of speeds by name, in the order of their file."""
    found = []
    for record in _read("speeds.json"):
        runs = {name: Run(**record[name]) for name in ("base", "other")}
        found.append(Pair(**{**_with_all(record, Pair), **runs}))
    return {pair.name: pair for pair in found}


@cache
def remains() -> dict[str, str]:
    """What was found to lie behind an error that is left, by the name of the row or the pair."""
    return _read("remains.json")


@cache
def sources() -> dict[str, Source]:
    return {name: Source(**record) for name, record in _read("sources.json").items()}


@cache
def second_looks() -> list[SecondLook]:
    return [SecondLook(**record) for record in _read("second_look.json")]


def looked_at_again(row: Row) -> tuple[Row, dict[str, Any]]:
    """`row` as the code that was measured has it, and what is new of its model's configuration."""
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
    """The configuration of a model of `models.json`, with `changes`."""
    record = {**_read("models.json")[name], **(changes or {})}
    config_class = getattr(transformers, record.pop("config"))
    return config_class(**record, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def held_out(names: Collection[str]) -> frozenset[str]:
    """Half of `names`, drawn by a fixed seed: what is not looked at while the planner is mended."""
    return frozenset(random.Random(HELD_OUT_SEED).sample(sorted(names), len(names) // 2))


def held_out_pairs() -> frozenset[str]:
    """The pairs that are not looked at: those of rows that are held out, and half of the others, drawn likewise."""
    others = [name for name in pairs() if name not in rows()]
    return held_out(others) | (held_out(rows()) & pairs().keys())


def _read(file: str) -> Any:
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


def _with_all(record: dict[str, Any], kind: type) -> dict[str, Any]:
    """`record`, which must have just the members of `kind`. Raises ValueError for another."""
    expected = {field.name for field in fields(kind)}
    if record.keys() != expected:
        wrong = sorted(record.keys() ^ expected)
        raise ValueError(f"row {record.get('name')!r} lacks, or has besides, {', '.join(wrong)}")
    return record
