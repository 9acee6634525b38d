"""Measurements of tracking steps, and corrections of the profile of any batch size, kept in a checkpoint."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from profile_builders import in_all_blocks

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.adapt.corrections import Corrections, MeasuringCodec, Observation, by_index, without_codecs
from adacc_hf.adapt.tracking import next_tracking_step
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.memory_profile import FORWARD


def shapes_of(samples):
    return (("input_ids", (samples, 16)),)


@pytest.fixture
def corrections():
    return Corrections(AdaccConfig(memory_budget=0.6))


def test_missing_bytes_grow_with_the_batch_and_never_shrink(corrections, gpt2_like_profile):
    profile = gpt2_like_profile()

    def added(samples):
        corrected = corrections.applied(profile, shapes_of(samples))
        return corrected.blocks[0].forward_base_bytes - profile.blocks[0].forward_base_bytes

    assert [added(samples) for samples in (2, 4, 8)] == [0, 0, 0]
    corrections.add_missing({FORWARD: 100}, 4 * 16, "a step was measured")
    assert [added(samples) for samples in (2, 4, 8)] == [100, 100, 200]
    corrections.add_missing({FORWARD: 10}, 8 * 16, "a larger step was measured")
    assert [added(samples) for samples in (2, 4, 8, 16)] == [210, 210, 210, 420]
    corrections.add_missing({FORWARD: 5}, 2 * 16, "a smaller step was measured")
    assert added(2) == added(8) == 215


def test_static_bytes_raise_every_peak(corrections, gpt2_like_profile):
    profile = gpt2_like_profile()
    corrections.static_bytes = 1000
    corrected = corrections.applied(profile, None)
    assert corrected.static_bytes == profile.static_bytes + 1000
    assert corrected.tail_peak_bytes == profile.tail_peak_bytes + 1000


def test_only_a_change_asks_for_another_look_at_policies(corrections):
    observed = Observation(num_outliers={("h.0", "attn"): 2}, errors={("h.0", "attn", "int8"): 0.1})
    versions = []
    for codecs in ([], [("h.0", "attn", "int4")]):
        for _ in range(2):
            corrections.observe(observed)
            corrections.switch_off(codecs)
            versions.append(corrections.version)
    assert versions == [1, 1, 2, 2]
    assert "switched off" in corrections.reason


def test_a_checkpoint_keeps_all_but_static_bytes(corrections):
    corrections.tightened, corrections.static_bytes = 7, 100
    corrections.switch_off([("h.0", "attn", "int4")])
    corrections.num_outliers, corrections.errors = {("h.0", "attn"): 2}, {("h.0", "attn", "int8"): 0.1}
    corrections.add_missing({FORWARD: 100}, 64, "a step was measured")
    record = json.loads(json.dumps(corrections.to_json()))
    resumed = Corrections.from_json(corrections.config, record)
    assert resumed.to_json() == corrections.to_json()
    assert resumed.static_bytes == 0, "the new profile counts them"


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


CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture(scope="module")
def profiles(tiny_gpt2, token_batch):
    """Profiles of one model at two sizes. Eager attention clones four times: queries, keys, values and its result."""
    model = tiny_gpt2("eager", attn_pdrop=0.0)
    return [profile_model(model, token_batch(tokens=tokens), CONFIG) for tokens in (12, 7)]


def clones(profile):
    return [value for value in profile.kinds[0].values if value.name == "attn:clone"]


def test_one_of_four_activations_of_a_name_is_told_from_the_others_at_every_size(profiles):
    queries, keys, values, result = clones(profiles[0])
    assert [value.role for value in (queries, keys, values, result)] == ["qkv"] * 3 + ["linear"]
    switched_off = in_all_blocks(profiles[0], {(0, keys.index, "channel_int4")})
    blocks = ["transformer.h.0", "transformer.h.1"]
    assert switched_off == {(block, "attn:clone#2", "channel_int4") for block in blocks}
    for profile in profiles:
        remaining_profile = without_codecs(profile, switched_off)
        others = [value for value in profile.kinds[0].values if value.index != clones(profile)[1].index]
        assert clones(remaining_profile)[1].codecs == ()
        assert [remaining_profile.kinds[0].values[value.index] for value in others] == others


def test_what_is_switched_off_in_one_block_is_so_for_its_kind(profiles):
    profile, _ = profiles
    assert not clones(without_codecs(profile, {("transformer.h.1", "attn:clone", "channel_int4")}))[0].codecs
    assert without_codecs(profile, {("transformer.h.9", "attn:clone", "channel_int4")}) == profile
    assert without_codecs(profile, {("transformer.h.1", "attn:clone", "int8")}) == profile
