"""Profiles of models with a loss function outside the model."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.price.heads import ModelWithLoss
from adacc_hf.torch_glue.memory import forward_loss

CONFIG = AdaccConfig(min_compress_bytes=0)


def compute_loss(model, batch):
    labels = batch.pop("labels")
    logits = model(**batch).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_loss_made_of_the_outputs(tiny_gpt2, token_batch):
    """A loss of the outputs leads to the same kinds as the model's own loss. Model and batch are unchanged."""
    model, batch = tiny_gpt2(), token_batch()
    modules = {name: dict(m.__dict__) for name, m in model.named_modules()}
    profile, own = profile_model(model, batch, CONFIG, compute_loss=compute_loss), profile_model(model, batch, CONFIG)
    assert [kind.digest for kind in profile.kinds] == [kind.digest for kind in own.kinds]
    assert [block.name for block in profile.blocks] == [block.name for block in own.blocks]
    assert profile.model_class == own.model_class
    assert list(batch) == list(token_batch())
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == modules


def test_a_loss_with_a_backward_of_its_own_is_refused(tiny_gpt2, token_batch):
    """A loss with its own backward, such as a gradient penalty, is refused: the profile keeps no graph for it."""

    def penalty(model, batch):
        output = model(**batch, output_hidden_states=True)
        (gradient,) = torch.autograd.grad(output.loss, output.hidden_states[0], create_graph=True)
        return output.loss + gradient.square().sum()

    with pytest.raises(ValueError, match=r"a backward of its own .*: train without adacc_hf"):
        profile_model(tiny_gpt2(), token_batch(), CONFIG, compute_loss=penalty)


def test_without_a_loss_the_error_names_both_ways(tiny_gpt2, token_batch):
    batch = {"input_ids": token_batch()["input_ids"]}
    with pytest.raises(ValueError, match=r"add the labels to the batch, or.*compute_loss="):
        profile_model(tiny_gpt2(), batch, CONFIG)


def test_an_output_without_a_loss_attribute():
    with pytest.raises(ValueError, match="returns no loss"):
        forward_loss(torch.nn.Linear(2, 2), {"input": torch.ones(1, 2)})
    with_loss = ModelWithLoss(torch.nn.Linear(2, 2), lambda model, batch: model(**batch).sum())
    assert forward_loss(with_loss, {"input": torch.ones(1, 2)}).requires_grad
