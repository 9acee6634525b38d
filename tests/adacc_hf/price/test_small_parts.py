"""Small parts of a batch: few of them, none large, of sizes that tell samples and lengths apart."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from adacc_hf import AdaccConfig, Policy, profile_model
from adacc_hf.price.other_sizes import small_parts
from adacc_hf.price.profiler import estimate_profile
from adacc_hf.torch_glue.batch_shapes import batch_shapes

LOSSLESS = AdaccConfig(actions=("retain", "recompute"), head="plain")


def texts(samples, tokens, labels):
    return {"input_ids": torch.zeros(samples, tokens).long(), "labels": torch.zeros(samples, labels).long()}


def sizes_of(part):
    return tuple(tuple(shape.size) for shape in batch_shapes(part))


@given(samples=st.integers(1, 40), tokens=st.integers(16, 300), labels=st.integers(16, 300), is_pair=st.booleans())
def test_no_part_is_larger_than_about_half(samples, tokens, labels, is_pair):
    """Lengths are rounded, so that it may be a little more, and aligned ones are not cut below 16 tokens."""
    batch = texts(samples, tokens, labels if is_pair else tokens)
    for parts in small_parts(batch, is_pair):
        assert len(set(map(sizes_of, parts))) == len(parts) <= 6
        amounts = [sum(map(prod, sizes_of(part))) for part in parts]
        assert amounts == sorted(amounts)
        if tokens >= 48 and labels >= 48:
            assert amounts[-1] <= 0.75 * sum(map(prod, sizes_of(batch)))


@given(samples=st.integers(2, 40), tokens=st.integers(17, 300), labels=st.integers(17, 300))
def test_the_lengths_of_a_pair_vary_by_themselves(samples, tokens, labels):
    parts = [sizes_of(part) for part in small_parts(texts(samples, tokens, labels), has_pairs=True)[0]]
    lengths = [(first[1], second[1]) for first, second in parts]
    assert len({(first[0], first[1]) for first, _ in parts}) >= 4
    assert len({(second[0], second[1]) for _, second in parts}) >= 4
    ratios = {round(first / second, 2) for first, second in lengths}
    assert len(ratios) >= 3


def test_labels_that_are_no_longer_than_their_text_vary_with_it():
    parts = small_parts(texts(4, 100, 100))[0]
    assert all(first == second for first, second in map(sizes_of, parts))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_images_have_none(samples):
    assert small_parts({"pixel_values": torch.zeros(samples, 3, 32, 32), "labels": torch.zeros(samples)}) == []


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, use_cache=False))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, use_cache=False, **sizes))


def vit():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes))


CASES = [(gpt2, texts(samples, tokens, tokens), 0.03) for samples, tokens in ((1, 120), (2, 90), (3, 40), (5, 100))]
# Sums of three products stand for the larger of several sums: see ProfileSizes.is_rough.
CASES += [(t5, texts(samples, *lengths), 0.3) for samples, *lengths in ((2, 80, 40), (4, 120, 15), (4, 60, 60))]
CASES += [(vit, {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4).long()}, 0.01)]


@pytest.mark.parametrize(("build", "batch", "tolerance"), CASES)
def test_what_they_tell_is_what_the_whole_batch_takes(build, batch, tolerance, one_thread):
    """Peaks of plain training and of full recomputation; stored bytes are sums of products of sizes, and exact."""
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    told = estimate_profile(model, batch, LOSSLESS, optimizer)
    whole = profile_model(model, batch, LOSSLESS, optimizer)
    for action in ("retain", "recompute"):
        ours, real = Policy.uniform(told, action), Policy.uniform(whole, action)
        assert ours.predicted_stored_bytes == real.predicted_stored_bytes
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=tolerance)
    assert told.sizes.class_of(told.measured[0][0]) is not None
