"""Lossless training under AdaccCallback is plain training, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.torch_glue.compat import CHECKPOINTING


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
    "fp32": {},
    "bf16-evaluation-clipping": {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "max_grad_norm": 0.1},
    "accumulation-label-smoothing": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    "epochs-checkpointing-no-clipping": {
        "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 24, "eval_on_start": True,
        "eval_strategy": "epoch", "max_grad_norm": 0.0, CHECKPOINTING: True,
    },
    "compute_loss": {"trainer_class": OwnLoss, "eval_strategy": "steps", "eval_steps": 1},
    "compute_loss by position": {"trainer_class": CallsByPosition},
    "dispatched-batches": {"accelerator_config": {"split_batches": True, "dispatch_batches": True}},
}  # fmt: skip


@pytest.mark.gate
@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_bit_equal_to_plain(train, lossless, name):
    callback = AdaccCallback(**lossless)
    run = train([callback], **SETTINGS[name])
    assert callback.policy.action_counts()["recompute"] > 0
    run.assert_equals(train(**SETTINGS[name]))


def test_user_checkpointing_is_set_again_afterwards(train, lossless):
    run = train([AdaccCallback(**lossless)], **{CHECKPOINTING: True})
    block = run.trainer.model.transformer.h[0]
    assert block.gradient_checkpointing is True
    assert block._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint


class GenerateInTrainMode(TrainerCallback):
    """Callback that calls generate() on the training model in train mode at the end of every step."""

    def __init__(self):
        self.tokens = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(state.global_step)
            model.train()
            prompt = torch.tensor([[5, 6, 7]])
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, use_cache=True
            )
            self.tokens.append(out.tolist())


def test_generate_and_evaluate_in_mid_run_are_as_without(train, lossless):
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    plain_tokens, tokens = GenerateInTrainMode(), GenerateInTrainMode()
    plain = train([plain_tokens], **settings)
    train([AdaccCallback(**lossless), tokens], **settings).assert_equals(plain)
    assert tokens.tokens == plain_tokens.tokens
    assert len(tokens.tokens) == 5


def test_a_faster_head_is_all_that_changes_where_everything_fits(train, heads_take):
    heads_take(plain=1.0, chunked=0.5)
    callback = AdaccCallback(memory_budget=1.0)
    run, plain = train([callback]), train()
    assert callback.policy.head == "chunked"
    assert callback.policy.action_counts().keys() == {"retain"}
    # The heads were timed on a quarter of the batch's rows.
    assert callback.policy.predicted_overhead_ms == pytest.approx(-0.5 * 4)
    # The chunked head adds in another order: losses, and after several steps weights, differ by a few units of float32.
    assert run.losses == pytest.approx(plain.losses, rel=1e-4)
    lossless = AdaccCallback(memory_budget=1.0, actions=("retain", "recompute"))
    train([lossless]).assert_equals(plain)
    assert lossless.policy.is_plain
