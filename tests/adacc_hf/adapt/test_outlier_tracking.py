"""Tracking steps: when they are due, and what codecs measure in them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from adacc_hf.adapt.gradient_check import GradientError
from adacc_hf.adapt.outlier_tracking import Measurements, MeasuringCodec, Observation
from adacc_hf.adapt.tracking import is_tracking_step
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.kernels.codecs import get_codec


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [("exponential", [1, 2, 4, 8, 16, 32]), ("off", []), (1, list(range(1, 41))), (7, [7, 14, 21, 28, 35])],
)
def test_the_schedule(tracking, expected):
    assert [step for step in range(-3, 41) if is_tracking_step(step, tracking)] == expected


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


def measure(tensor, codec, options, **settings):
    measurements = Measurements()
    measuring = MeasuringCodec(codec, (0, 3), options, AdaccConfig(**settings), measurements)
    decoded = measuring.decode(measuring.encode(tensor))
    return measurements.read({}, frozenset()), decoded


def with_outliers(channels):
    tensor = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    tensor[:, channels] *= 100
    return tensor


def test_what_is_measured_is_the_error_of_what_is_stored():
    tensor = with_outliers([])
    observation, decoded = measure(tensor, get_codec("outlier_int4"), [option("outlier_int4")])
    assert observation.num_outliers == {(0, 3): 0}
    assert observation.errors == {(0, 3): pytest.approx(float((decoded - tensor).norm() / tensor.norm()), rel=1e-5)}
    assert observation.option_errors == {(0, 3, "outlier_int4"): observation.errors[0, 3]}


@pytest.mark.parametrize(("room_bytes", "is_measured"), [(3 * 32 * 64 * 4 + 2 * 8 * 32 * 64, True), (40000, False)])
def test_errors_are_measured_where_the_budget_has_room(room_bytes, is_measured):
    """Outlier channels are counted in any case."""
    measurements, codec = Measurements(), get_codec("outlier_int4")
    tensor = with_outliers([5])
    MeasuringCodec(codec, (0, 3), [option(codec.name)], AdaccConfig(), measurements, room_bytes).encode(tensor)
    observation = measurements.read({}, frozenset())
    assert observation.num_outliers == {(0, 3): 1}
    assert (observation.errors.keys(), measurements.unmeasured) == (
        ({(0, 3)}, set()) if is_measured else (set(), {(0, 3)})
    )


def test_under_a_bound_an_option_is_priced_with_the_channels_that_were_found():
    arguments = with_outliers([5, 9]), get_codec("outlier_int4"), [option("outlier_int4")]
    observation, _ = measure(*arguments)
    assert observation.num_outliers == {(0, 3): 2}
    assert observation.option_errors[0, 3, "outlier_int4"] == observation.errors[0, 3]
    observation, _ = measure(*arguments, max_error=0.1)
    # Raw channels hold almost all of the norm, so that the error in the other channels counts for little.
    assert observation.option_errors[0, 3, "outlier_int4"] < 0.1 * observation.errors[0, 3]


def test_with_a_bound_the_finer_codec_is_priced_too():
    options = [option("outlier_int4"), option("int8")]
    observation, _ = measure(with_outliers([]), get_codec("outlier_int4"), options, max_error=0.1)
    assert 0 < observation.option_errors[0, 3, "int8"] < 0.1 * observation.errors[0, 3]
    observation, _ = measure(with_outliers([]), get_codec("outlier_int4"), options)
    assert set(observation.option_errors) == {(0, 3, "outlier_int4")}


def test_lossless_codecs_have_no_error():
    observation, _ = measure(torch.rand(4, 64) > 0.5, get_codec("bitmask"), [option("bitmask")])
    assert observation == Observation(
        num_outliers={}, errors={}, option_errors={}, gradients={}, degrading_codecs=frozenset()
    )


def test_the_worst_of_all_ranks_counts():
    ranks = [
        Observation(
            num_outliers={(0, 1): 3},
            errors={(0, 1): 0.1, (0, 2): 0.4},
            option_errors={},
            gradients={0: GradientError(error=0.2, cosine=0.9)},
            degrading_codecs=frozenset({(0, 1, "int8")}),
        ),
        Observation(
            num_outliers={(0, 1): 1, (1, 0): 7},
            errors={(0, 1): 0.2},
            option_errors={},
            gradients={0: GradientError(error=0.1, cosine=0.8), 1: GradientError(error=0.0, cosine=1.0)},
            degrading_codecs=frozenset({(0, 2, "int8")}),
        ),
    ]
    merged = Observation.merged(ranks)
    assert merged == Observation.merged(ranks[::-1])
    assert merged.num_outliers == {(0, 1): 3, (1, 0): 7}
    assert merged.errors == {(0, 1): 0.2, (0, 2): 0.4}
    assert merged.gradients[0] == GradientError(error=0.2, cosine=0.8)
    assert merged.degrading_codecs == {(0, 1, "int8"), (0, 2, "int8")}


# Observations of one batch size, transferred to the profile of another.


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


FOUND = Observation(
    num_outliers={(0, 1): 3, (1, 0): 5},
    errors={(0, 1): 0.25, (1, 0): 0.5},
    option_errors={(0, 1, "int8"): 0.25, (1, 0, "int4"): 0.5},
    gradients={0: GradientError(error=0.1, cosine=0.9), 1: GradientError(error=0.2, cosine=0.8)},
    degrading_codecs=frozenset({(0, 1, "int8"), (1, 0, "int4")}),
)
PAIRS = profile_of([("a", 0), ("b", 0), ("a#2", 1), ("b#2", 1)], [["x", "y"], ["z", "y"]])


def test_the_same_profile_gets_its_observation_back():
    assert FOUND.by_name(PAIRS).for_profile(PAIRS) == FOUND


@pytest.mark.parametrize(
    ("blocks", "kinds", "num_outliers", "gradients"),
    [
        ([("a#2", 0), ("b#2", 0), ("a", 1), ("b", 1)], [["z", "y"], ["x", "y"]], {(0, 0): 5, (1, 1): 3}, {0, 1}),
        ([("a", 0), ("b", 0)], [["x", "y"]], {(0, 1): 3}, {0}),
        ([("a", 0), ("b", 1)], [["x", "y"], ["x", "y"]], {(0, 1): 3, (1, 1): 3}, {0, 1}),
        ([("a", 0), ("b", 0)], [["y", "x"]], {(0, 0): 3}, {0}),
        ([("a", 0), ("b", 0)], [["x"]], {}, {0}),
        ([("c", 0)], [["x", "y"]], {}, set()),
        ([("a", 0), ("a#2", 0)], [["z", "x", "y"]], {(0, 2): 3, (0, 0): 5}, {0}),
    ],
    ids=["other order", "fewer calls", "more kinds", "other numbers", "no such value", "other blocks", "one kind"],
)
def test_another_profile_gets_what_is_of_its_activations(blocks, kinds, num_outliers, gradients):
    other = profile_of(blocks, kinds)
    observation = FOUND.by_name(PAIRS).for_profile(other)
    assert observation.num_outliers == num_outliers
    assert observation.errors == {key: {3: 0.25, 5: 0.5}[count] for key, count in num_outliers.items()}
    codecs = {3: "int8", 5: "int4"}
    assert observation.option_errors.keys() == {(*key, codecs[count]) for key, count in num_outliers.items()}
    assert observation.degrading_codecs == observation.option_errors.keys()
    assert observation.gradients.keys() == gradients


def test_the_worst_of_two_sizes_counts():
    single = profile_of([("a", 0)], [["y"]])
    single_observation = Observation(
        num_outliers={(0, 0): 9},
        errors={(0, 0): 0.01},
        option_errors={},
        gradients={0: GradientError(error=0.9, cosine=0.1)},
        degrading_codecs=frozenset(),
    )
    merged = Observation.merged([FOUND.by_name(PAIRS), single_observation.by_name(single)])
    observation = merged.for_profile(PAIRS)
    assert observation.num_outliers == {(0, 1): 9, (1, 0): 5}
    assert observation.errors == FOUND.errors
    assert observation.gradients[0] == GradientError(error=0.9, cosine=0.1)
    assert merged.for_profile(single).num_outliers == {(0, 0): 9}
