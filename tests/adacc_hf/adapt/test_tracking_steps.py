"""The callback's tracking schedule: the steps that count outliers, and the changes that follow."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
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
