"""ProfiledModel: the model is restored after a profile, and models and batches that cannot be profiled are refused."""

import random

import numpy
import pytest
import torch
from model_builders import everything_of
from torch import nn

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.errors import NoBlocksError

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_model_is_left_as_it_was(toy_model, toy_batch, autocast):
    """Profiling restores parameters, gradients, buffers that a block changes in place, random generators and modes."""

    def setup(block):
        block.norm = nn.BatchNorm1d(6)
        block.register_buffer("count", torch.zeros(()))

    def forward(block, hidden):
        block.count += random.random() + numpy.random.random()  # SpecAugment's masks are drawn from numpy
        return hidden + nn.functional.dropout(block.down(block.norm(block.up(hidden)).tanh()), 0.5)

    model, batch = toy_model(forward, setup=setup), toy_batch()
    model(**batch).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = everything_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        profile_model(model, batch, CONFIG)
    after = everything_of(model)
    assert after.keys() == before.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.training
    assert not any("_forward_hooks" in m.__dict__ and m._forward_hooks for m in model.modules())


def test_a_model_is_left_as_it_was_after_an_error(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    before, modules = everything_of(model), {name: dict(m.__dict__) for name, m in model.named_modules()}
    broken = model.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profile_model(model, token_batch(), CONFIG)
    broken.remove()
    after = everything_of(model)
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == modules


def test_eval_mode_is_refused(tiny_gpt2, token_batch):
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is in eval mode: call model\.train\(\)"):
        profile_model(tiny_gpt2().eval(), token_batch())


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({}, "is empty"),
        (None, "has type NoneType"),
        (torch.ones(2, 8), "has type Tensor"),
        ([{"input_ids": torch.ones(2, 8)}], "has type list"),
        ({"input_ids": [[1, 2]], "labels": [[1, 2]]}, "has no tensors ('input_ids' has type list)"),
    ],
    ids=["empty", "None", "tensor", "list", "lists"],
)
def test_a_batch_that_is_no_dict_is_refused(tiny_gpt2, batch, problem):
    with pytest.raises(ValueError) as error:
        profile_model(tiny_gpt2(), batch)
    assert str(error.value) == (
        f"batch {problem}: give a dict of the model's keyword arguments as tensors, labels included, such as "
        "{'input_ids': ids, 'labels': ids}"
    )


def test_a_model_without_blocks_is_refused():
    with pytest.raises(NoBlocksError, match="Linear has no repeated blocks"):
        profile_model(nn.Linear(2, 2), {"x": torch.zeros(1, 2)})
