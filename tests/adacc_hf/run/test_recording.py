"""Recorded calls: replay starts from the call's arguments, also if the block replaces them in a container."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.tape_cache import profiled_tapes

CONFIG = AdaccConfig(min_compress_bytes=0)


def changes_a_list(block, hidden, features):
    x = (block.up(hidden) + features[0] * 0.5).tanh()
    features.insert(0, x.detach().cos())
    return hidden + block.down(x)


def replaces_the_data_of_a_buffer(block, hidden, features):
    x = block.up(hidden)
    y = (x + block.mean).tanh()
    block.mean.data = 0.9 * block.mean + 0.1 * x.detach().mean((0, 1))
    return hidden + block.down(y)


def give_state(block):
    block.register_buffer("mean", torch.ones(8))
    block.shift = nn.Parameter(torch.ones(8), requires_grad=False)


@pytest.mark.parametrize("forward", [changes_a_list, replaces_the_data_of_a_buffer])
def test_what_a_call_was_given_is_replayed_from(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    """Replay reads the call's own arguments, in the first call, whose plan is made afterwards, and in later calls."""

    def build():
        return toy_model(forward, setup=give_state, kwargs_of=lambda x: {"features": [x.sin()]})

    batch = toy_batch()
    plain = run_steps(build(), batch)
    profile = profile_model(build(), batch, CONFIG)
    assert any(value.recomputable for value in profile.kinds[0].activations)
    model = build()
    assert not profiled_tapes(model).tapes  # so that the first call is recorded alone
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch), plain)
