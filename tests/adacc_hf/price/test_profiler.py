"""The profiler: its results for GPT-2, and that it leaves a model unchanged."""

import copy
import logging
import random

import numpy
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import NoBlocksError
from adacc_hf.price.model_recording import recompute_outcome
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


def everything_of(model):
    state = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    generators = [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor(numpy.random.get_state()[1].tolist()),
    ]
    return {**state, **grads, "generators": torch.cat(generators)}


@pytest.fixture(scope="module")
def gpt2_profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2(layers=3), token_batch(), CONFIG)


def test_like_blocks_are_one_kind(gpt2_profile):
    assert gpt2_profile.model_class == "GPT2LMHeadModel"
    assert [block.name for block in gpt2_profile.blocks] == [f"transformer.h.{i}" for i in range(3)]
    assert [block.kind for block in gpt2_profile.blocks] == [0, 0, 0]
    (kind,) = gpt2_profile.kinds
    assert kind.block_class == "GPT2Block"
    assert gpt2_profile.device == "cpu"


def test_unlike_blocks_are_kinds_of_their_own(toy_model, toy_batch):
    def setup(block):
        block.steep = len(kinds)
        kinds.append(block)

    def forward(block, hidden):
        x = block.up(hidden)
        return hidden + block.down(x.tanh() if block.steep % 2 else x.sigmoid())

    kinds = []
    profile = profile_model(toy_model(forward, num_blocks=4, setup=setup), toy_batch(), CONFIG)
    assert [block.kind for block in profile.blocks] == [0, 1, 0, 1]
    assert len(profile.kinds) == 2


def test_what_a_gpt2_block_saves(gpt2_profile):
    kind = gpt2_profile.kinds[0]
    hidden = 2 * 12 * 32 * 4
    by_name = {value.name: value for value in kind.activations}
    assert by_name["argument 0"].nbytes == hidden
    assert not by_name["argument 0"].recomputable
    assert by_name["mlp.act:tanh"].nbytes == 4 * hidden
    masks = [value for value in kind.activations if value.role == "mask"]
    assert len(masks) == 3
    assert all(value.recomputable for value in kind.activations if value.producer is not None)
    states = [value for value in kind.values if value.is_generator_state]
    assert len(states) == len(masks)
    assert kind.forward_ms == pytest.approx(sum(operator.ms for operator in kind.operators))
    assert all(operator.ms > 0 for operator in kind.operators if operator.replayable)
    assert recompute_outcome(kind).stored_bytes == hidden + len(states) * torch.get_rng_state().nbytes


def test_the_mask_is_shared_by_all_blocks(tiny_gpt2, token_batch):
    batch = token_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    profile = profile_model(tiny_gpt2("eager", layers=3), batch, CONFIG)
    masks = [shared for shared in profile.shared if shared.nbytes >= 2 * 12 * 12]
    assert len(masks) == 1
    used_shared_tensors = {value.shared for kind in profile.kinds for value in kind.values if value.shared is not None}
    assert profile.shared.index(masks[0]) in used_shared_tensors


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


def refuse_many(model, samples, tokens=None):
    """Make `model` run out of memory in its second block with more than `samples` samples, or `tokens` tokens in
    each."""

    def check(block, args, kwargs):
        if args[0].shape[0] > samples or (tokens is not None and args[0].shape[1] > tokens):
            raise torch.OutOfMemoryError("CUDA out of memory")

    return model.transformer.h[1].register_forward_pre_hook(check, with_kwargs=True)


@pytest.mark.parametrize("most", [(3,), (3, 20)], ids=["few samples", "few samples that are cut"])
def test_a_batch_that_there_is_no_memory_to_profile_is_told_from_few_of_its_samples(
    tiny_gpt2, token_batch, run_steps, assert_same_steps, caplog, most
):
    model, batch = tiny_gpt2(), token_batch(8, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    plain, before = run_steps(model, batch), everything_of(model)
    refusal = refuse_many(model, *most)
    with caplog.at_level(logging.WARNING):
        profile = profile_model(model, batch, CONFIG, optimizer, all_sizes=True)
    refusal.remove()
    assert "not enough memory to profile the whole batch (CUDA out of memory)" in caplog.text
    after = everything_of(model)
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    with apply_policy(model, uniform_policy(profile, "recompute")):
        assert_same_steps(run_steps(model, batch), plain)
    whole_profile = profile_model(model, batch, CONFIG, optimizer)
    assert profile.plain_stored_bytes == whole_profile.plain_stored_bytes
    policies = [uniform_policy(each, "recompute") for each in (profile, whole_profile)]
    predicted, measured = (policy.predicted_peak_bytes - whole_profile.static_bytes for policy in policies)
    assert predicted == pytest.approx(measured, rel=0.03)  # the tolerance of peaks at sizes that were not profiled


@pytest.mark.parametrize(("samples", "most"), [(4, 1), (8, 0)], ids=["not two", "not even few"])
def test_a_batch_of_which_no_few_samples_can_be_profiled_ends_as_it_did(tiny_gpt2, token_batch, samples, most):
    model = tiny_gpt2()
    refuse_many(model, most)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        profile_model(model, token_batch(samples, 16), CONFIG)


def test_the_same_batch_gives_the_same_profile_but_for_times(tiny_gpt2, token_batch):
    def without_times(profile):
        return [
            [
                (v.index, v.name, v.nbytes, v.recomputable, [(c.codec, c.nbytes, c.error) for c in v.codecs])
                for v in k.values
            ]
            + [k.digest, k.slots]
            for k in profile.kinds
        ]

    model, batch = tiny_gpt2(), token_batch()
    first, second = profile_model(model, batch, CONFIG), profile_model(model, batch, CONFIG)
    assert without_times(first) == without_times(second)
    assert first.plain_stored_bytes == second.plain_stored_bytes
    assert first.static_bytes == second.static_bytes


def test_the_optimizers_state_is_static_memory(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    without, with_state = profile_model(model, batch, CONFIG), profile_model(model, batch, CONFIG, optimizer)
    parameters = sum(p.nbytes for p in model.parameters())
    counts = 4 * len(list(model.parameters()))
    assert with_state.static_bytes - without.static_bytes == 2 * parameters + counts


def test_eval_mode_is_refused(tiny_gpt2, token_batch):
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is in eval mode: call model\.train\(\)"):
        profile_model(tiny_gpt2().eval(), token_batch())


@pytest.mark.parametrize("batch", [{}, None, "text"], ids=repr)
def test_a_batch_that_is_no_dict_is_refused(tiny_gpt2, batch):
    with pytest.raises(ValueError, match=r"must be a non-empty dict of the model's keyword arguments"):
        profile_model(tiny_gpt2(), batch)


def test_a_batch_without_labels_is_refused(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    modules = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="add the labels to the batch"):
        profile_model(model, {"input_ids": token_batch()["input_ids"]})
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == modules


def test_a_model_without_blocks_is_refused():
    with pytest.raises(NoBlocksError, match="Linear has no repeated blocks"):
        profile_model(nn.Linear(2, 2), {"x": torch.zeros(1, 2)})


def test_no_grad_outside_does_not_matter(tiny_gpt2, token_batch, gpt2_profile):
    with torch.no_grad():
        profile = profile_model(tiny_gpt2(layers=3), token_batch(), CONFIG)
    assert profile.kinds[0].digest == gpt2_profile.kinds[0].digest


def test_a_profile_of_a_block_that_keeps_its_activations(toy_model, toy_batch):
    """Activations that a block keeps in an attribute, which die after the meter ended, do not break the profile."""

    def forward(block, hidden):
        block.kept = block.up(hidden).tanh()
        return hidden + block.down(block.kept)

    profile = profile_model(toy_model(forward), toy_batch(), CONFIG)
    assert len(profile.kinds) == 1


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


def test_a_copy_has_the_same_profile(tiny_gpt2, token_batch, gpt2_profile):
    profile = profile_model(copy.deepcopy(tiny_gpt2(layers=3)), token_batch(), CONFIG)
    assert [kind.digest for kind in profile.kinds] == [kind.digest for kind in gpt2_profile.kinds]
