"""Tracking steps: when they are due, and what codecs measure in them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from adacc_hf.adapt.corrections import MeasuringCodec, Observation, by_index
from adacc_hf.adapt.tracking import next_tracking_step
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.kernels.codecs import get_codec


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [("exponential", [1, 2, 4, 8, 16, 32]), ("off", []), (1, list(range(1, 41))), (7, [7, 14, 21, 28, 35])],
)
def test_the_schedule(tracking, expected):
    steps = {next_tracking_step(step, 100, tracking) for step in range(100, 140)}
    assert sorted(steps)[: len(expected)] == [100 + step for step in expected] or steps == {math.inf}


NAME = ("h.0", "attn")
KEY = (*NAME, "outlier_int4")


def option(name, **options):
    codec = get_codec(name, **options)
    return CodecOption(
        codec=name,
        options=tuple(sorted(codec.options.items())),
        nbytes=1,
        encode_ms=0.0,
        decode_ms=0.0,
        error=0.1,
        lossless=codec.lossless,
    )


def measure(tensor, codec, options, room_bytes=math.inf, **settings):
    observation = Observation()
    measuring = MeasuringCodec(codec, NAME, options, AdaccConfig(**settings), observation, room_bytes)
    decoded = measuring.decode(measuring.encode(tensor))
    observation.read()
    return observation, decoded


def with_outliers(channels):
    tensor = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    tensor[:, channels] *= 100
    return tensor


def test_what_is_measured_is_the_error_of_what_is_stored():
    tensor = with_outliers([])
    observation, decoded = measure(tensor, get_codec("outlier_int4"), [option("outlier_int4")])
    assert observation.num_outliers == {NAME: 0}
    error = pytest.approx(float((decoded - tensor).norm() / tensor.norm()), rel=1e-5)
    assert observation.errors == {KEY: error}


@pytest.mark.parametrize(("room_bytes", "is_measured"), [(3 * 32 * 64 * 4 + 2 * 8 * 32 * 64, True), (40000, False)])
def test_errors_are_measured_where_the_budget_has_room(room_bytes, is_measured):
    """Outlier channels are counted in any case."""
    codec = get_codec("outlier_int4")
    observation, _ = measure(with_outliers([5]), codec, [option(codec.name)], room_bytes)
    assert observation.num_outliers == {NAME: 1}
    assert bool(observation.errors) == is_measured


def test_under_a_bound_an_option_is_priced_with_the_channels_that_were_found():
    arguments = with_outliers([5, 9]), get_codec("outlier_int4"), [option("outlier_int4")]
    stored, _ = measure(*arguments)
    assert stored.num_outliers == {NAME: 2}
    refitted, _ = measure(*arguments, max_error=0.1)
    # Raw channels hold almost all of the norm, so that the error in the other channels counts for little.
    assert refitted.errors[KEY] < 0.1 * stored.errors[KEY]


def test_with_a_bound_the_finer_codec_is_priced_too():
    options = [option("outlier_int4"), option("int8")]
    observation, _ = measure(with_outliers([]), get_codec("outlier_int4"), options, max_error=0.1)
    assert 0 < observation.errors[(*NAME, "int8")] < 0.1 * observation.errors[KEY]
    observation, _ = measure(with_outliers([]), get_codec("outlier_int4"), options)
    assert set(observation.errors) == {KEY}


def test_lossless_codecs_have_no_error():
    observation, _ = measure(torch.rand(4, 64) > 0.5, get_codec("bitmask"), [option("bitmask")])
    assert observation == Observation()


def test_the_worst_of_all_ranks_counts():
    ranks = [
        Observation(
            num_outliers={("a", "x"): 3},
            errors={("a", "x", "int8"): 0.1, ("a", "y", "int8"): 0.4},
            gradients={"a": 0.2},
            degrading_codecs={("a", "x", "int8")},
        ),
        Observation(
            num_outliers={("a", "x"): 1, ("b", "x"): 7},
            errors={("a", "x", "int8"): 0.2},
            gradients={"a": 0.1, "b": 0.0},
            degrading_codecs={("a", "y", "int8")},
        ),
    ]
    merged = Observation.merged(ranks)
    assert merged == Observation.merged(ranks[::-1])
    assert merged == Observation(
        num_outliers={("a", "x"): 3, ("b", "x"): 7},
        errors={("a", "x", "int8"): 0.2, ("a", "y", "int8"): 0.4},
        gradients={"a": 0.2, "b": 0.0},
        degrading_codecs={("a", "x", "int8"), ("a", "y", "int8")},
    )


def profile_of(blocks, kinds):
    """Return a profile with blocks (name, kind); a kind is the list of its values' names."""
    return SimpleNamespace(
        blocks=[SimpleNamespace(name=name, kind=kind) for name, kind in blocks],
        kinds=[
            SimpleNamespace(names=names, values=[SimpleNamespace(index=i) for i in range(len(names))])
            for names in kinds
        ],
        kinds_of=lambda block: (block.kind,),
    )


@pytest.mark.parametrize(
    ("blocks", "kinds", "expected"),
    [
        ([("a", 0), ("b", 0)], [["x", "y"]], {(0, 1): 3}),
        ([("a", 0), ("b", 1)], [["x", "y"], ["x", "y"]], {(0, 1): 3, (1, 1): 2}),
        ([("a", 0), ("b", 0)], [["y", "x"]], {(0, 0): 3}),
        ([("a", 0), ("b", 0)], [["x"]], {}),
        ([("c", 0)], [["x", "y"]], {}),
    ],
    ids=["one kind", "two kinds", "other numbers", "no such value", "other blocks"],
)
def test_a_profile_gets_the_largest_figure_of_the_blocks_of_a_kind(blocks, kinds, expected):
    profile = profile_of(blocks, kinds)
    assert by_index(profile, {("a", "y"): 3, ("b", "y"): 2}) == expected
    with_codec = by_index(profile, {("a", "y", "int8"): 3, ("b", "y", "int8"): 2})
    assert with_codec == {(*key, "int8"): count for key, count in expected.items()}
