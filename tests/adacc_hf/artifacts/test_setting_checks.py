"""Wrong values of settings and arguments: each error names the setting, the value and what to write."""

import re

import numpy as np
import pytest
import torch

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.setting_checks import check_flag, check_integer, check_range, describe_value


@pytest.mark.parametrize(
    ("check", "name", "limits", "value", "message"),
    [
        (check_range, "gap", (0, 1), 2, "gap=2 is outside [0, 1]: choose a number in that range"),
        (check_range, "gap", (0, 1), None, "gap=None has type NoneType: choose a number in [0, 1]"),
        (check_range, "gap", (0, 1), "0.1", "gap='0.1' has type str, and is text: write 0.1 without quotes"),
        (check_range, "gap", (0, 1), "1e-2", "and is text: write 0.01 without quotes: choose a number in"),
        (check_range, "gap", (0, 1), "5%", "gap='5%' has type str: choose a number in [0, 1]"),
        (check_integer, "steps", (1, 9), 0, "steps=0 is not an int in [1, 9]: choose one in that range"),
        (check_integer, "steps", (1, 9), "3", "steps='3' is not an int in [1, 9], and is text: write 3 with"),
        (check_flag, "guard", (), "true", "guard='true' must be True or False, and is text: write True without"),
        (check_flag, "guard", (), 1, "guard=1 must be True or False"),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_write(check, name, limits, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(name, value, *limits)


def test_a_long_value_is_left_out():
    assert describe_value("policy", 5) == "policy=5 has type int"
    assert describe_value("policy", {"plans": list(range(100))}) == "policy has type dict"
    assert describe_value("batch", torch.zeros(3, 3)) == "batch has type Tensor"
    assert describe_value("memory_budget", np.float32(0.5)) == "memory_budget=np.float32(0.5) has type float32"


LINEAR = torch.nn.Linear(2, 2)


@pytest.fixture
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: solve_policy(p, budget=0.5), "solve_policy: budget=0.5 is not an argument: write memory_budget=0.5"),
        (
            lambda p: solve_policy(p, 0.5, actions=("retain",)),
            "actions=('retain',) is not an argument but a setting: write config=AdaccConfig(actions=('retain',))",
        ),
        (lambda p: solve_policy(p, 0.5, zzz=1), "zzz=1 is not an argument: choose from profile, memory_budget, config"),
        (
            lambda p: solve_policy(p, 0.5, {"head": "plain"}),
            "solve_policy: config={'head': 'plain'} has type dict: pass",
        ),
        (
            lambda p: solve_policy(p, AdaccConfig()),
            "memory_budget is an AdaccConfig: write solve_policy(profile, config=",
        ),
        (
            lambda p: solve_policy(LINEAR, 0.5),
            "profile=Linear(in_features=2, out_features=2, bias=True) has type Linear: pass the result",
        ),
        (lambda p: profile_model(LINEAR, {}, 0.5), "profile_model: config=0.5 has type float: pass setti"),
        (
            lambda p: profile_model(LINEAR, {}, memory_budget=0.5),
            "memory_budget=0.5 is not an argument but a setting: write config=AdaccConfig(memory_budget=0.5)",
        ),
        (lambda p: profile_model("gpt2", {}), "profile_model: model='gpt2' has type str: pass the torch.nn.Module"),
        (lambda p: apply_policy(LINEAR, "a.json"), "policy='a.json' has type str: pass a Policy. solve_"),
        (lambda p: apply_policy(LINEAR, p), "apply_policy: policy has type Profile: pass a Policy"),
        (lambda p: apply_policy(solve_policy(p, 0.5), LINEAR), "apply_policy: model has type Policy: wri"),
        (
            lambda p: apply_policy(LINEAR, solve_policy(p, 0.5), {}),
            "apply_policy: config={} has type dict: pass settings as config=AdaccConfig(...)",
        ),
    ],
)
def test_a_function_says_what_to_pass(profile, call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call(profile)


def test_right_arguments_are_passed_on(profile):
    config = AdaccConfig(actions=("retain", "recompute"))
    by_position = solve_policy(profile, 0.5, config)
    assert isinstance(by_position, Policy)
    assert solve_policy(profile=profile, memory_budget=0.5, config=config) == by_position
