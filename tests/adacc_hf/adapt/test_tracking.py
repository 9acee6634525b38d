"""When a tracking step is due, and what codecs measure in it."""

from __future__ import annotations

import pytest
import torch

from adacc_hf.adapt.accuracy import GradientError
from adacc_hf.adapt.evolution import is_tracking_step
from adacc_hf.adapt.tracking import Findings, MeasuringCodec, Observation
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import CodecOption
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
    findings = Findings()
    measuring = MeasuringCodec(
        codec, (0, 3), options, AdaccConfig(zscore_threshold=4.0, **settings), findings, tracks=True
    )
    decoded = measuring.decode(measuring.encode(tensor))
    return findings.read({}, frozenset()), decoded


def with_outliers(channels):
    tensor = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    tensor[:, channels] *= 100
    return tensor


def test_what_is_measured_is_the_error_of_what_is_stored():
    tensor = with_outliers([])
    found, decoded = measure(tensor, get_codec("outlier_int4"), [option("outlier_int4")])
    assert found.num_outliers == {(0, 3): 0}
    assert found.errors == {(0, 3): pytest.approx(float((decoded - tensor).norm() / tensor.norm()), rel=1e-5)}
    assert found.option_errors == {(0, 3, "outlier_int4"): found.errors[0, 3]}


def test_under_a_bound_an_option_is_priced_with_the_channels_that_were_found():
    arguments = with_outliers([5, 9]), get_codec("outlier_int4"), [option("outlier_int4")]
    found, _ = measure(*arguments)
    assert found.num_outliers == {(0, 3): 2}
    assert found.option_errors[0, 3, "outlier_int4"] == found.errors[0, 3]
    found, _ = measure(*arguments, max_error=0.1)
    # Raw channels hold almost all of the norm, so that what the rest loses counts for little.
    assert found.option_errors[0, 3, "outlier_int4"] < 0.1 * found.errors[0, 3]


def test_with_a_bound_the_finer_codec_is_priced_too():
    options = [option("outlier_int4"), option("int8")]
    found, _ = measure(with_outliers([]), get_codec("outlier_int4"), options, max_error=0.1)
    assert 0 < found.option_errors[0, 3, "int8"] < 0.1 * found.errors[0, 3]
    found, _ = measure(with_outliers([]), get_codec("outlier_int4"), options)
    assert set(found.option_errors) == {(0, 3, "outlier_int4")}


def test_without_the_guard_outliers_alone_are_counted():
    found, _ = measure(with_outliers([5]), get_codec("outlier_int4"), [option("outlier_int4")], guard=False)
    assert found.num_outliers == {(0, 3): 1}
    assert not found.errors


def test_lossless_codecs_have_no_error():
    found, _ = measure(torch.rand(4, 64) > 0.5, get_codec("bitmask"), [option("bitmask")])
    assert found == Observation(num_outliers={}, errors={}, option_errors={}, gradients={}, degrading=frozenset())


def test_the_worst_of_all_ranks_counts():
    ranks = [
        Observation(
            num_outliers={(0, 1): 3},
            errors={(0, 1): 0.1, (0, 2): 0.4},
            option_errors={},
            gradients={0: GradientError(error=0.2, cosine=0.9)},
            degrading=frozenset({(0, 1, "int8")}),
        ),
        Observation(
            num_outliers={(0, 1): 1, (1, 0): 7},
            errors={(0, 1): 0.2},
            option_errors={},
            gradients={0: GradientError(error=0.1, cosine=0.8), 1: GradientError(error=0.0, cosine=1.0)},
            degrading=frozenset({(0, 2, "int8")}),
        ),
    ]
    merged = Observation.merged(ranks)
    assert merged == Observation.merged(ranks[::-1])
    assert merged.num_outliers == {(0, 1): 3, (1, 0): 7}
    assert merged.errors == {(0, 1): 0.2, (0, 2): 0.4}
    assert merged.gradients[0] == GradientError(error=0.2, cosine=0.8)
    assert merged.degrading == {(0, 1, "int8"), (0, 2, "int8")}
