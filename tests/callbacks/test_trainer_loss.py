"""Losses that the Trainer computes instead of the model: the profile contains the same step, and training equals plain
training."""

from __future__ import annotations

import pytest
from torch.nn.functional import cross_entropy
from transformers import Trainer

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
