"""What modules hold and change as they are called: each call changes it once, and a profile not at all."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.torch_glue.states import LOOKS, ModuleStates, states_before

CONFIG = AdaccConfig(min_compress_bytes=0)


def give_state(block):
    block.register_buffer("count", torch.zeros(()))
    block.norm = nn.BatchNorm1d(6)
    block.mean = torch.zeros(8)
    block.num_calls = 0
    block.generator = torch.Generator().manual_seed(3)


def changes_all(block, hidden):
    x = block.norm(block.up(hidden)) + block.mean
    x = x * (1.0 + 0.1 * block.num_calls + 0.1 * block.count.clone())
    x = x * (torch.rand(x.shape, generator=block.generator) > 0.2)
    block.num_calls += 1
    with torch.no_grad():
        block.count += 1
        block.mean.lerp_(x.mean((0, 1)), 0.1)
    return hidden + block.down(x.tanh())


def changes_all_and_reads(block, hidden):
    """So that torch's checkpoint runs it."""
    return changes_all(block, hidden) * (1.0 if hidden.sum().item() > 0 else 0.5)


@pytest.mark.parametrize("forward", [changes_all, changes_all_and_reads])
def test_state_changes_once_per_call(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    batch = toy_batch()
    plain_model, model = (toy_model(forward, setup=give_state) for _ in range(2))
    plain = run_steps(plain_model, batch)
    profile = profile_model(model, batch, CONFIG)
    assert all((kind.fallback is not None) is (forward is changes_all_and_reads) for kind in profile.kinds)
    with apply_policy(model, Policy.uniform(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch), plain)
    for ours, theirs in zip(model.layers, plain_model.layers, strict=True):
        assert ours.num_calls == theirs.num_calls == 3
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())


def test_what_is_made_meanwhile_stays():
    """Else a table would be made anew in the middle of training, by operators that the profile has not seen."""
    module = nn.Identity()
    module.table, module.grown, module.size = None, torch.zeros(2), 2
    states = ModuleStates(module.modules())
    module.table = table = torch.ones(3)
    module.grown = grown = torch.zeros(4)
    module.size = 4
    assert states.keep_changed()
    states.restore()
    assert module.table is table
    assert module.grown is grown
    assert module.size == 2


def test_nothing_is_kept_of_what_did_not_change():
    module = nn.BatchNorm1d(6)
    module(torch.randn(2, 6))
    assert not ModuleStates(module.modules()).keep_changed()


def test_a_block_that_changes_nothing_is_soon_looked_at_no_more(monkeypatch):
    looks = []
    monkeypatch.setattr(
        "adacc_hf.torch_glue.states.ModuleStates", lambda modules: looks.append(1) or ModuleStates(modules)
    )
    still, moving = nn.Linear(3, 3), nn.BatchNorm1d(3)
    for _ in range(LOOKS + 2):
        for block in (still, moving):
            with states_before(block) as changed:
                block(torch.randn(4, 3))
            assert len(changed) == (block is moving)
    assert len(looks) == LOOKS + LOOKS + 2
