"""Corrections: what a run has learned, applied to the profile of any batch size, and kept in a checkpoint."""

from __future__ import annotations

import json

import pytest

from adacc_hf.adapt.corrections import Corrections, Observation
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.price.memory_profile import FORWARD


def shapes_of(samples):
    return (("input_ids", (samples, 16)),)


@pytest.fixture
def corrections():
    return Corrections(AdaccConfig(memory_budget=0.6))


def test_a_tightened_budget_takes_the_place_of_the_config_s(corrections):
    assert corrections.memory_budget == 0.6
    corrections.tightened = 12345
    assert corrections.memory_budget == 12345


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
