"""The profiler: its results for GPT-2, and that it leaves a model unchanged."""

import logging

import pytest
import torch
from model_builders import everything_of

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


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


def test_a_batch_without_labels_is_refused(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    modules = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="add the labels to the batch"):
        profile_model(model, {"input_ids": token_batch()["input_ids"]})
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == modules


def test_a_profile_of_a_block_that_keeps_its_activations(toy_model, toy_batch):
    """Activations that a block keeps in an attribute, which die after the meter ended, do not break the profile."""

    def forward(block, hidden):
        block.kept = block.up(hidden).tanh()
        return hidden + block.down(block.kept)

    profile = profile_model(toy_model(forward), toy_batch(), CONFIG)
    assert len(profile.kinds) == 1
