"""Blocks that a batch runs without gradients only have no choices in a policy."""

import copy

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from adacc_hf import AdaccConfig, Profile, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.price.idle_blocks import ExecutedBlocks
from adacc_hf.reports.explain import NOTHING_TO_DECIDE, explain_policy
from adacc_hf.reports.report import policy_report


class WithTeacher(nn.Module):
    """A student, and a teacher before it. `in_use` leaves the teacher out, `gradients` trains it too."""

    def __init__(self, student):
        super().__init__()
        self.teacher, self.student = copy.deepcopy(student), student
        self.in_use, self.gradients = True, False

    def forward(self, **batch):
        with torch.set_grad_enabled(self.gradients):
            before = self.teacher(**batch).loss if self.in_use else 0.0
        return CausalLMOutput(loss=self.student(**batch).loss + before)


@pytest.fixture
def model(tiny_gpt2):
    return WithTeacher(tiny_gpt2()).train()


CONFIG = AdaccConfig(actions=("retain", "recompute"))


def gradients(model, batch):
    torch.manual_seed(0)
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("budget", [0.3, "1GiB"])
def test_they_are_in_the_policy_without_actions(model, token_batch, budget, tmp_path):
    profile = profile_model(model, token_batch(), CONFIG)
    teacher = {block.name for block in profile.blocks if not profile.kind_of(block).values}
    assert teacher == {f"teacher.transformer.h.{index}" for index in range(len(teacher))} != set()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    policy = solve_policy(profile, budget, CONFIG)
    assert policy.idle_blocks == teacher
    assert NOTHING_TO_DECIDE in explain_policy(policy, profile)
    policy_report(policy=policy, profile=profile).save(tmp_path / "report")
    plain = gradients(model, token_batch())
    with apply_policy(model, policy):
        ours = gradients(model, token_batch())
        model.gradients = True
        later = gradients(model, token_batch())
    assert all(map(torch.equal, ours, plain))
    assert len(later) == 2 * len(ours)
    assert all(map(torch.equal, later, gradients(model, token_batch())))


def test_the_others_are_missed(model, token_batch):
    model.in_use = False
    with pytest.raises(UncalledBlocksError, match=r"blocks, teacher.transformer.h.0 first, were not called"):
        profile_model(model, token_batch(), CONFIG)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_copy_of_a_watched_model_is_watched_by_nobody_else(model, token_batch):
    with ExecutedBlocks({"teacher": model.teacher}) as executed_blocks:
        copied = copy.deepcopy(model)
        copied(**token_batch())
        assert not executed_blocks.names
        model(**token_batch())
    assert executed_blocks.names == {"teacher"}
