"""Which policy a size of batch runs under, and what is remembered of sizes over a long run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adacc_hf.callbacks import situations as situations_module
from adacc_hf.callbacks.situations import ENOUGH, MAX_UNPLANNED, Situation, Situations, most_wanted
from adacc_hf.tapes import known_shapes
from adacc_hf.tracking.shapes import TensorShape


def ids(length, samples=2):
    return (TensorShape("input_ids", (samples, length)),)


def parts(count):
    """A batch of so many parts that each of them has a name of its own: no two have a bucket in common."""
    return (TensorShape(f"part_{count}", (2,)),)


@pytest.fixture
def profiled():
    """The situations of a run whose first batch had 32 tokens."""
    situations = Situations()
    rectifier = SimpleNamespace(predicted_peak_bytes=lambda: 0)
    situations.add(Situation(ids(32), rectifier, "plans", recording="recording"), is_profiled=True)
    return situations


def plans_of(situations, shapes):
    return situations.plans_for(situations.choose(shapes), shapes)


def test_a_size_that_blocks_have_forgotten_is_recorded_anew(profiled, monkeypatch):
    """Under a policy its recording may take more memory than the budget has."""
    monkeypatch.setattr(situations_module, "MAX_SHAPES", 3)
    assert [plans_of(profiled, ids(length)) for length in (20, 20, 21, 22, 20)] == [
        "recording", "plans", "recording", "recording", "plans",
    ]  # fmt: skip
    assert [plans_of(profiled, ids(length)) for length in (23, 20, 21)] == ["recording", "plans", "recording"]
    assert plans_of(profiled, ids(32)) == "plans"


def test_situations_remember_as_many_sizes_as_blocks_do():
    assert situations_module.MAX_SHAPES == known_shapes.MAX_SHAPES


def test_sizes_that_never_come_again_are_not_remembered_for_ever(profiled):
    for length in range(5000):
        assert profiled.choose(parts(1000 + length)) is None
    assert len(profiled.unplanned()) == MAX_UNPLANNED
    assert most_wanted([profiled.unplanned()]) is None
    for length in range(ENOUGH * 100):
        profiled.choose(parts(length % 100))
    assert most_wanted([profiled.unplanned()]) is not None
