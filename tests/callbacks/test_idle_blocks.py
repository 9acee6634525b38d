"""Training in which some blocks run without gradients: a teacher next to its student, and networks that train in
turn."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.adapt import adaptive_phase, profile_requests

PARTS = ("student", "teacher")
TEACHER = {f"teacher.transformer.h.{index}" for index in range(2)}


class Pair(torch.nn.Module):
    """Two models of the same classes that learn from a text and from each other. `trained(step)` returns the names of
    the models that train in a step."""

    def __init__(self, model, trained):
        super().__init__()
        self.student, self.teacher = model, copy.deepcopy(model)
        self.trained, self.step = trained, 0

    def forward(self, input_ids, labels):
        outputs = {}
        for part in PARTS:
            with torch.set_grad_enabled(torch.is_grad_enabled() and part in self.trained(self.step)):
                outputs[part] = getattr(self, part)(input_ids, labels=labels)
        student, teacher = outputs.values()
        return {"loss": student.loss + teacher.loss + mse_loss(student.logits, teacher.logits)}


class SetStep(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.step = state.global_step + 1


@pytest.fixture
def assert_equal_to_plain(train, make_model, lossless):
    """Return `assert_equal_to_plain(trained, max_steps)`, which trains a `Pair` with and without the callback and
    returns the callback."""

    def compare(trained, max_steps, **settings):
        callback, runs, states = AdaccCallback(**{**lossless, **settings}), [], []
        for callbacks in ([], [callback]):
            runs.append(train([SetStep(), *callbacks], model=Pair(make_model(), trained), max_steps=max_steps))
            states.append(torch.get_rng_state())
        runs[1].assert_equals(runs[0])
        assert torch.equal(*states)
        assert not any(module._forward_pre_hooks for module in runs[1].trainer.model.modules())
        return callback

    return compare


def policy_steps(callback):
    return [event["step"] for event in callback.history if event["event"] == "policy"]


@pytest.mark.parametrize("budget", [0.5, "4MiB"])
def test_a_policy_is_made_at_once_for_the_blocks_that_train(assert_equal_to_plain, budget):
    callback = assert_equal_to_plain(lambda _: {"student"}, 6, memory_budget=budget)
    assert policy_steps(callback) == [0]
    assert callback.policy.idle_blocks == TEACHER
    assert not callback.policy.is_plain
    measured_events = [event for event in callback.history if "measured_peak_bytes" in event]
    assert measured_events
    assert all(event["measured_peak_bytes"] <= 1.01 * event["peak_bytes"] for event in measured_events)
    assert not measured_events[-1]["corrected"], "the first measurement may correct another moment than the peak's"


def test_blocks_that_train_later_get_plans(assert_equal_to_plain, monkeypatch):
    monkeypatch.setattr(adaptive_phase, "LOOK_STEPS", 3)
    callback = assert_equal_to_plain(lambda step: PARTS if step > 6 else {"student"}, 12)
    assert policy_steps(callback) == [1, 10]
    assert not callback.policy.idle_blocks


def test_blocks_that_never_train_together_stay_under_torchs_checkpoint(assert_equal_to_plain, monkeypatch, caplog):
    monkeypatch.setattr(adaptive_phase, "LOOK_STEPS", 3)
    monkeypatch.setattr(profile_requests, "MOST_TRIES", 2)
    callback = assert_equal_to_plain(lambda step: {PARTS[step % 2]}, 12)
    assert policy_steps(callback) == [0]
    assert callback.policy.idle_blocks == {name.replace("teacher", "student") for name in TEACHER}
    assert "stay under torch's checkpoint: no batch came that calls all of them" in caplog.text
