"""A batch larger than a fixed policy's causes one warning, with the predicted peak."""

import copy
import logging

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="adacc_hf")
    return lambda: [record.message for record in caplog.records if "is larger than" in record.message]


@pytest.fixture(scope="module")
def profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2(), token_batch(batch=2, tokens=16), CONFIG)


@pytest.fixture
def profile_and_model(profile, tiny_gpt2):
    return profile, tiny_gpt2()


def train(model, batch):
    model(**batch).loss.backward()


def test_a_larger_batch_is_warned_of_once_with_its_peak(profile_and_model, token_batch, warnings):
    profile, model = profile_and_model
    policy = uniform_policy(profile, "recompute")
    with apply_policy(model, policy):
        train(model, token_batch(batch=2, tokens=16))
        train(model, token_batch(batch=1, tokens=24))
        assert warnings() == []
        for _ in range(2):
            train(model, token_batch(batch=4, tokens=32))
    (text,) = warnings()
    assert "input_ids 4x32" in text
    assert "input_ids 2x16" in text
    larger = profile_model(model, token_batch(batch=4, tokens=32), CONFIG)
    warned_bytes = policy.predicted_peak_bytes + 3 * policy.predicted_stored_bytes
    assert policy.predicted_peak_bytes < warned_bytes <= uniform_policy(larger, "recompute").predicted_peak_bytes


def test_evaluation_and_other_models_are_not_warned_of(profile_and_model, token_batch, warnings):
    profile, model = profile_and_model
    with apply_policy(model, uniform_policy(profile, "retain")):
        other = copy.deepcopy(model)
        with torch.no_grad():
            model(**token_batch(batch=4, tokens=16))
        model.eval()
        model(**token_batch(batch=4, tokens=16))
        train(other, token_batch(batch=4, tokens=16))
    train(model.train(), token_batch(batch=4, tokens=16))
    assert warnings() == []
    assert not model._forward_pre_hooks


def test_a_policy_that_replaces_another_brings_its_own_sizes(profile_and_model, token_batch, warnings):
    profile, model = profile_and_model
    large = uniform_policy(profile_model(model, token_batch(batch=4, tokens=16), CONFIG), "recompute")
    with apply_policy(model, uniform_policy(profile, "recompute")) as handle:
        handle.replace(large)
        train(model, token_batch(batch=4, tokens=16))
        assert warnings() == []
        handle.replace(uniform_policy(profile, "recompute"))
        train(model, token_batch(batch=4, tokens=16))
    assert len(warnings()) == 1
