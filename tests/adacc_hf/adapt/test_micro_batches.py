"""Losses that the Trainer computes instead of the model: the profile contains the same step, and training equals plain
training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

from adacc_hf.adapt.micro_batches import LastBatch
from adacc_hf.callbacks import AdaccCallback


def next_token_loss(output, labels, num_items_in_batch=None):
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(Trainer):
    """Trainer that removes the labels from its inputs, as Transformers' Trainer does for label smoothing."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = next_token_loss(output, labels)
        return (loss, output) if return_outputs else loss


class CallsByPosition(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        output = model(inputs["input_ids"])
        loss = next_token_loss(output, inputs["labels"])
        return (loss, output) if return_outputs else loss


SETTINGS = {
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "compute_loss": {"trainer_class": OwnLoss, "eval_strategy": "steps", "eval_steps": 1},
    "compute_loss by position": {"trainer_class": CallsByPosition},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loss_that_the_trainer_makes(train, lossless, name):
    callback = AdaccCallback(**lossless)
    run = train([callback], **SETTINGS[name])
    assert callback.policy.action_counts()["recompute"] > 0
    assert callback.profile.model_class == "GPT2LMHeadModel"
    run.assert_equals(train(**SETTINGS[name]))


def test_the_measured_step_is_the_trainers(train, lossless):
    """The peak is predicted correctly for a loss that needs other memory than the model's own."""
    callback = AdaccCallback(**lossless)
    train([callback], label_smoothing_factor=0.1, max_steps=8)
    memory_events = [event for event in callback.history if "measured_peak_bytes" in event]
    assert memory_events
    # The Trainer keeps a few scalars as well. They are within the 1 % below which no cost is corrected.
    assert not any(event["corrected"] for event in memory_events)


@pytest.mark.parametrize(
    ("make", "is_own"),
    [
        pytest.param(lambda output: output.loss, True, id="the very loss"),
        pytest.param(lambda output: (output.loss / 2 * 3, output), True, id="a multiple, with the outputs"),
        pytest.param(lambda output: output.scores.sum(), False, id="of other outputs"),
        pytest.param(lambda output: output.loss + output.scores.sum(), False, id="of both"),
    ],
)
def test_what_the_trainer_makes_of_the_models_outputs_decides(make, is_own):
    """TRL's trainers of preferences let the model compute a loss, and train on another one."""
    model = torch.nn.Linear(2, 2)
    scores = model.forward
    model.forward = lambda input: SimpleNamespace(loss=scores(input).square().mean(), scores=scores(input))
    last = LastBatch(model)
    last.note_loss_call({"texts": 1}, lambda *_: None)
    last.note_loss(make(model(input=torch.ones(2, 2))))
    assert (last.compute_loss is None) is is_own
    assert list(last.batch) == (["input"] if is_own else ["texts"])
    last.remove()


def test_the_models_own_loss_comes_first():
    """If the model computes a loss, the Trainer's `compute_loss` is called no more often than by training."""
    model = torch.nn.Linear(2, 2)
    last = LastBatch(model)
    last.note_loss_call({"input": 1}, lambda *_: None)
    model.forward = lambda input: type("Output", (), {"loss": input.sum()})()
    model(input=torch.ones(2, 2))
    assert last.compute_loss is None
    assert list(last.batch) == ["input"]
    last.remove()
    assert last.batch is None
    assert not model._forward_hooks


def model_with_loss(loss):
    """Return a model that accepts positional and named arguments and returns `loss` and scores."""
    model = torch.nn.Linear(2, 2)
    model.forward = lambda input, scale=1, *positional, **more: SimpleNamespace(loss=loss, scores=input * scale)
    return model


def test_arguments_without_a_name_get_that_of_the_model():
    model = model_with_loss(loss=torch.ones(()))
    last = LastBatch(model)
    model(torch.ones(2, 2), scale=3, labels=4)
    assert list(last.batch) == ["input", "scale", "labels"]
    model(torch.ones(2, 2), 3, 5, labels=4)  # the argument 5 has no name
    assert last.batch is None


def test_what_makes_no_loss_is_no_batch():
    """TRL's OnlineDPOTrainer calls the model in `training_step`, and computes the loss there."""
    model = model_with_loss(loss=None)
    last = LastBatch(model)
    model(torch.ones(2, 2), scale=3)
    assert last.batch is None
    assert last.compute_loss is None
