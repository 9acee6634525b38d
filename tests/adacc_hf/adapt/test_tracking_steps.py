"""The callback's tracking schedule: the steps that count outliers, and the changes that follow."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

import adacc_hf.adapt.policy_fit as fit_module
from adacc_hf import AdaccCallback, Policy, Profile
from adacc_hf.adapt.corrections import MeasuringCodec
from adacc_hf.solve.simple_policies import uniform_policy

COMPRESS = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.45}


@pytest.fixture
def counting_steps(monkeypatch):
    """Return a callback whose `steps` are the steps that counted outlier channels."""

    class Clock(TrainerCallback):
        def __init__(self):
            self.step, self.steps = 0, []

        def on_step_begin(self, args, state, control, **kwargs):
            self.step = state.global_step + 1

    clock = Clock()
    original = MeasuringCodec.encode

    def counting(*args):
        if clock.step not in clock.steps:
            clock.steps.append(clock.step)
        return original(*args)

    monkeypatch.setattr(MeasuringCodec, "encode", counting)
    return clock


@pytest.mark.parametrize(("tracking", "expected"), [("exponential", [2, 4, 8]), (3, [3, 6, 9]), ("off", [])], ids=str)
def test_outliers_are_counted_at_tracking_steps_only(train, counting_steps, tracking, expected):
    callback = AdaccCallback(**COMPRESS, tracking=tracking)
    # Each step has two micro-batches. A block's first call under a policy is recorded, and the second one encodes.
    train([callback, counting_steps], max_steps=11, gradient_accumulation_steps=2)
    assert counting_steps.steps == expected
    assert [event["step"] for event in callback.history if event["event"] == "tracking"] == expected


def test_given_policies_are_not_changed(train, counting_steps):
    callback = AdaccCallback(policy=lambda profile: uniform_policy(profile, "compress"), **COMPRESS, tracking=1)
    train([callback, counting_steps])
    assert counting_steps.steps == []


def test_an_outlier_that_appears_in_mid_run_changes_the_policy_and_its_files(train, tmp_path, monkeypatch):
    class PlantOutlier(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                for block in model.transformer.h:
                    block.ln_2.bias.data[[5, 40, 41]] = 30.0

    # Replaces the solver, whose choice depends on measured times.
    monkeypatch.setattr(fit_module, "solve_policy", lambda profile, *_: uniform_policy(profile, "compress"))
    callback = AdaccCallback(**COMPRESS, tracking=1)
    train([callback, PlantOutlier()], max_steps=7)
    outlier_counts = {
        event["step"]: event["num_outliers"] for event in callback.history if event["event"] == "tracking"
    }
    assert most_in_ln_2(outlier_counts[4]) < most_in_ln_2(outlier_counts[5]) == 3
    changes = [event["step"] for event in callback.history if event["event"] == "change"]
    assert 5 in changes, "the outliers of step 5 change the policy at its end"
    assert Policy.load(tmp_path / "run" / "adacc_policy.json") == callback.policy
    assert Profile.load(tmp_path / "run" / "adacc_profile.json") == callback.profile
    assert 3 in [dict(choice.options).get("num_outliers") for _, choice in callback.policy.plans[0].choices]


def most_in_ln_2(counts):
    return max(count for name, count in counts.items() if ".ln_2:" in name)
