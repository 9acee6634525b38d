"""Shared storages are counted once: slots that die in forward, and outputs that others keep."""

from types import SimpleNamespace

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)
ACTIONS = ("retain", "recompute", "compress")


@pytest.fixture
def assert_stores_as_predicted(run_steps, assert_same_steps):
    """`assert_stores_as_predicted(model, batch)`: trains exactly and stores as predicted, under any policy; returns the
    profile."""

    def check(model, batch):
        plain = run_steps(model, batch)
        profile = profile_model(model, batch, CONFIG)
        assert measure_step(model, batch).stored_bytes == profile.plain_stored_bytes
        policies = [random_policy(profile, seed, ACTIONS, lossless=True) for seed in range(4)]
        for policy in [uniform_policy(profile, "retain"), uniform_policy(profile, "recompute"), *policies]:
            with apply_policy(model, policy, CONFIG):
                assert_same_steps(run_steps(model, batch), plain)
                assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes
        return profile

    return check


def value_named(kind, name):
    return next(value for value in kind.values if value.name == name)


def looks_aside(block, hidden):
    """Compute with gradients a value that no output depends on, as routers of experts do."""
    x = block.up(hidden).tanh()
    (x.exp().sin() * x).sum()
    return hidden + block.down(x)


def test_what_dies_in_forward_is_no_activation(toy_model, toy_batch, assert_stores_as_predicted):
    model, batch = toy_model(looks_aside), toy_batch()
    kind = assert_stores_as_predicted(model, batch).kinds[0]
    for name in ("block:exp", "block:sin"):
        assert not value_named(kind, name).saved
        assert not value_named(kind, name).activation
    tanh = value_named(kind, "block:tanh")
    assert tanh.saved  # by its own node and by `down`; the product that saves it too is dead
    assert kind.slots.count(tanh.index) == 2


def draws_aside(block, hidden):
    """Save noise in a dead slot only. The noise cannot be replayed, so values computed from it must be stored."""
    noise = torch.bernoulli(hidden.detach().sigmoid())  # of probabilities: never drawn again
    (noise * block.up(hidden)).sum()
    return hidden + block.down((noise + hidden).tanh())


def test_nothing_is_replayed_from_what_died(toy_model, toy_batch, assert_stores_as_predicted):
    model, batch = toy_model(draws_aside), toy_batch()
    kind = assert_stores_as_predicted(model, batch).kinds[0]
    assert not value_named(kind, "block:bernoulli").activation
    assert not value_named(kind, "block:tanh").recomputable


def ends_in_tanh(block, hidden):
    return block.down(block.up(hidden).sin()).tanh()


def test_an_output_that_its_maker_saves_is_counted_there(toy_model, toy_batch, assert_stores_as_predicted):
    """An output saved by the operator that computes it is counted there. tanh saves its result, which the next block's
    layer or the head saves as its input."""
    model, batch = toy_model(ends_in_tanh, num_blocks=4), toy_batch()
    profile = assert_stores_as_predicted(model, batch)
    assert len(profile.kinds) == 2  # the first block's input comes from elsewhere
    for kind in profile.kinds:
        result = value_named(kind, "block:tanh")
        assert result.activation
        assert not result.recomputable
        assert result.codecs == ()
    assert [shared.nbytes for shared in profile.shared] == [0]


def test_a_bias_passed_on_is_counted_once(toy_model, toy_batch, assert_stores_as_predicted):
    """A bias that the first layer computes and passes to all later ones is counted once, as in WavLM."""

    def forward(block, hidden, bias=None):
        if bias is None:
            bias = torch.sigmoid(block.up(hidden))
        return hidden + block.down((block.up(hidden) * bias).tanh()), bias

    model, batch = toy_model(forward, num_blocks=3), toy_batch()

    def run(x):
        hidden, bias = model.inlet(x), None
        for layer in model.layers:
            hidden, bias = layer(hidden, bias=bias)
        return SimpleNamespace(loss=model.head(hidden).square().mean())

    model.forward = run
    profile = assert_stores_as_predicted(model, batch)
    first, later = (profile.kinds[block.kind] for block in profile.blocks[:2])
    assert value_named(first, "block:sigmoid").activation
    assert not value_named(first, "block:sigmoid").recomputable
    assert value_named(later, "argument bias").shared is not None
    assert len(profile.kinds) == 2
