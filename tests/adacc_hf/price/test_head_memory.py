"""The memory of the chunked head, measured without the blocks' backward, equals the memory of a whole measured step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from adacc_hf import AdaccConfig
from adacc_hf.price import measured_profile
from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.training_step import TrainingStep


@pytest.fixture
def tiny_t5(one_thread):
    def build():
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 2}
        config = T5Config(vocab_size=512, decoder_start_token_id=0, use_cache=False, **sizes)
        return T5ForConditionalGeneration(config).train()

    return build


def profiles(monkeypatch, model, batch, num_micro=1):
    """Return the profile of `batch`, and its profile if the chunked head is measured in a whole step. Both have no
    times."""
    found = []
    for can_bridge in (measured_profile.can_bridge_blocks, lambda *_: False):
        monkeypatch.setattr(measured_profile, "can_bridge_blocks", can_bridge)
        step = TrainingStep(gradient_accumulation_steps=num_micro)
        config, measurement = AdaccConfig(min_compress_bytes=0), MemoryOnlyMeasurement(Measurement())
        profile = measured_profile.measure_profile(model, Batch(batch), config, step, measurement)
        found.append(replace(profile, step_ms=0.0, available_bytes=0))
    return found


@pytest.mark.parametrize("name", ["gpt2", "gpt2 with a cache", "llama", "packed llama", "tied llama", "t5 in bf16"])
def test_the_chunked_head_takes_as_many_bytes_as_in_a_whole_step(
    name, monkeypatch, tiny_gpt2, tiny_llama, tiny_t5, token_batch
):
    build = {"gpt2": tiny_gpt2, "t5 in bf16": tiny_t5}.get(name, tiny_llama)
    settings = {"gpt2 with a cache": {"use_cache": True}, "tied llama": {"tie_word_embeddings": True}}.get(name, {})
    build = tiny_gpt2 if "gpt2" in name else build
    batch = token_batch(2, 24)
    if name == "packed llama":
        batch["position_ids"] = torch.arange(24).remainder(11)[None].repeat(2, 1)
    # Under autocast, T5's blocks keep a shared input for replay that is freed in the forward that stores nothing.
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name):
        profile, expected = profiles(monkeypatch, build(**settings), batch)
    assert profile.other_heads
    assert profile == expected


@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_earlier_micro_batches(is_tied, monkeypatch, tiny_llama, token_batch):
    """Autograd adds a gradient to an earlier gradient in place, so the backward of the head leaves fewer bytes."""
    model = tiny_llama(tie_word_embeddings=is_tied)
    profile, expected = profiles(monkeypatch, model, token_batch(2, 24), num_micro=2)
    assert profile == expected


def test_frozen_blocks_have_no_backward(monkeypatch, tiny_gpt2, token_batch):
    model = tiny_gpt2(layers=3)
    model.requires_grad_(False)
    model.transformer.h[2].requires_grad_(True)
    profile, expected = profiles(monkeypatch, model, token_batch(2, 24))
    assert profile == expected


def test_a_second_head_takes_no_whole_step(monkeypatch, tiny_gpt2, token_batch):
    """Two heads need no more measured steps than one."""
    heads, measure_step = [], measured_profile.measure_step
    batch, measurement = Batch(token_batch(2, 24)), MemoryOnlyMeasurement(Measurement())
    for head in ("auto", "plain"):
        counting = partial(lambda head, *args: heads.append(head) or measure_step(*args), head)
        monkeypatch.setattr(measured_profile, "measure_step", counting)
        measured_profile.measure_profile(tiny_gpt2(), batch, AdaccConfig(head=head), TrainingStep(), measurement)
    assert heads.count("auto") == heads.count("plain") > 0


def test_a_loss_without_chunks_has_one_head(monkeypatch, tiny_gpt2, token_batch):
    """A loss that reads the full logits cannot be chunked. Its profile equals the profile with a plain head alone."""

    def compute_loss(model, batch):
        return model(**batch).logits.square().mean()

    model, batch, measurement = tiny_gpt2(), Batch(token_batch(2, 24)), MemoryOnlyMeasurement(Measurement())
    step = TrainingStep(compute_loss=compute_loss)
    both, plain = (
        measured_profile.measure_profile(model, batch, AdaccConfig(head=head), step, measurement)
        for head in ("auto", "plain")
    )
    assert not both.other_heads
    assert replace(both, step_ms=0.0, available_bytes=0) == replace(plain, step_ms=0.0, available_bytes=0)


def test_no_gradient_is_left(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    step, measurement = TrainingStep(gradient_accumulation_steps=2), MemoryOnlyMeasurement(Measurement())
    measured_profile.measure_profile(model, Batch(token_batch(2, 24)), AdaccConfig(), step, measurement)
    assert all(parameter.grad is None for parameter in model.parameters())
