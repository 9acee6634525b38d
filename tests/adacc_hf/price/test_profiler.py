"""The profiler: its results, what it leaves unchanged, and models and batches that it refuses."""

import random

import numpy
import pytest
import torch
from model_builders import everything_of
from torch import nn
from torch.nn.functional import cross_entropy

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.price import profiler
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import forward_loss

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


def test_no_grad_outside_does_not_matter(tiny_gpt2, token_batch, gpt2_profile):
    with torch.no_grad():
        profile = profile_model(tiny_gpt2(layers=3), token_batch(), CONFIG)
    assert profile.kinds[0].digest == gpt2_profile.kinds[0].digest


def test_frozen_blocks_are_profiled(tiny_gpt2, token_batch, run_steps, assert_same_steps):
    """Frozen blocks are profiled, as in fine-tuning of the last layers. The first block saves nothing."""
    model, batch = tiny_gpt2(layers=3), token_batch()
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    plain = run_steps(model, batch)
    profile = profile_model(model, batch, CONFIG)
    frozen = profile.kind_of(profile.blocks[0])
    assert not [value for value in frozen.activations if value.saved]
    with apply_policy(model, uniform_policy(profile, "recompute")):
        assert_same_steps(run_steps(model, batch), plain)


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


def test_without_a_loss_the_error_names_both_ways(tiny_gpt2, token_batch):
    batch = {"input_ids": token_batch()["input_ids"]}
    with pytest.raises(ValueError, match=r"add the labels to the batch, or.*compute_loss="):
        profile_model(tiny_gpt2(), batch, CONFIG)


def test_a_profile_of_a_block_that_keeps_its_activations(toy_model, toy_batch):
    """Activations that a block keeps in an attribute, which die after the meter ended, do not break the profile."""

    def forward(block, hidden):
        block.kept = block.up(hidden).tanh()
        return hidden + block.down(block.kept)

    profile = profile_model(toy_model(forward), toy_batch(), CONFIG)
    assert len(profile.kinds) == 1


@pytest.mark.parametrize("num_micro", [1, 4])
def test_the_model_runs_once(toy_model, toy_batch, monkeypatch, num_micro):
    """However many kinds of blocks a model has."""

    def setup(block):
        block.kind = len(blocks)
        blocks.append(block)

    def forward(block, hidden):
        x = block.up(hidden)
        for _ in range(1 + block.kind):
            x = x.tanh().sigmoid()
        return hidden + block.down(x)

    calls, blocks = [], []
    model = toy_model(forward, num_blocks=3, setup=setup)
    monkeypatch.setattr(profiler, "forward_loss", lambda *args: calls.append(1) or forward_loss(*args))
    profile = profile_model(model, toy_batch(), CONFIG, gradient_accumulation_steps=num_micro)
    assert len(profile.kinds) == 3
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
