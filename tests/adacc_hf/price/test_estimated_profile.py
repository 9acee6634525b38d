"""Small parts of a batch: few, small, and with sizes that separate the effects of samples and lengths."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from math import prod
from pathlib import Path

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

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.step_time import plain_blocks_ms
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.price import estimated_profile
from adacc_hf.price.batch_subsampling import Batch, move_media_first, small_parts
from adacc_hf.price.estimated_profile import (
    FIRST_SHARE,
    describe_duration,
    estimate_profile,
    parts_within,
    peak_limit,
    predict_duration,
    profiling_bytes,
    start_small,
)
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape import guards

LOSSLESS = AdaccConfig(actions=("retain", "recompute"), head="plain")


def texts(samples, tokens, labels):
    return {"input_ids": torch.zeros(samples, tokens).long(), "labels": torch.zeros(samples, labels).long()}


def sizes_of(batch):
    return tuple(shape.size for shape in batch.shapes)


@given(samples=st.integers(1, 40), tokens=st.integers(16, 300), labels=st.integers(16, 300), is_pair=st.booleans())
def test_no_part_is_larger_than_about_half(samples, tokens, labels, is_pair):
    """No part is larger than about half of the batch: lengths are rounded up, and aligned ones are not cut below 16
    tokens."""
    batch = Batch(texts(samples, tokens, labels if is_pair else tokens))
    for parts in small_parts(batch, has_pairs=is_pair):
        assert len(set(map(sizes_of, parts))) == len(parts) <= 6
        amounts = [sum(map(prod, sizes_of(part))) for part in parts]
        assert amounts == sorted(amounts)
        if tokens >= 48 and labels >= 48:
            assert amounts[-1] <= 0.75 * sum(map(prod, sizes_of(batch)))


@given(samples=st.integers(2, 40), tokens=st.integers(17, 300), labels=st.integers(17, 300))
def test_the_lengths_of_a_pair_vary_by_themselves(samples, tokens, labels):
    parts = [sizes_of(part) for part in small_parts(Batch(texts(samples, tokens, labels)), has_pairs=True)[0]]
    lengths = [(first[1], second[1]) for first, second in parts]
    assert len({(first[0], first[1]) for first, _ in parts}) >= 4
    assert len({(second[0], second[1]) for _, second in parts}) >= 4
    ratios = {round(first / second, 2) for first, second in lengths}
    assert len(ratios) >= 3


def test_labels_that_are_no_longer_than_their_text_vary_with_it():
    parts = small_parts(Batch(texts(4, 100, 100)))[0]
    assert all(first == second for first, second in map(sizes_of, parts))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_images_have_none(samples):
    batch = Batch({"pixel_values": torch.zeros(samples, 3, 32, 32), "labels": torch.zeros(samples)})
    assert small_parts(batch) == []


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=256, use_cache=False))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, use_cache=False, **sizes))


def vit():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes))


CASES = [(gpt2, texts(samples, tokens, tokens), 0.03) for samples, tokens in ((1, 120), (2, 90), (3, 40), (5, 100))]
CASES += [
    (t5, texts(samples, *lengths), 0.01) for samples, *lengths in ((1, 80, 80), (2, 80, 40), (4, 120, 15), (4, 60, 60))
]
CASES += [(vit, {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4).long()}, 0.01)]


@pytest.mark.parametrize(("build", "batch", "tolerance"), CASES)
def test_what_they_tell_is_what_the_whole_batch_takes(build, batch, tolerance, one_thread):
    """Peaks predicted from parts agree with the whole batch's, for plain training and full recomputation.

    Stored bytes are sums of products of sizes, and exact.
    """
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = estimate_profile(model, batch, LOSSLESS, TrainingStep(optimizer=optimizer))
    whole_profile = profile_model(model, batch, LOSSLESS, optimizer)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_stored_bytes == real.predicted_stored_bytes
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=tolerance)
    assert estimate.sizes.size_class(estimate.measured[0][0]) is not None


TABLE = architectures()


def four_samples(name):
    first, second = (TABLE[name].make_batch(seed) for seed in range(2))
    return {key: torch.cat([value, second[key]]) for key, value in first.items()}


@pytest.mark.parametrize("name", ["whisper", "smolvlm", "gemma3"])
def test_features_and_images_are_told_of(name, one_thread):
    """Batches with features or images are predicted.

    Memory that grows with samples alone is a term next to the term of texts; images are in the text, and parts keep
    them there.
    """
    model, batch = TABLE[name].build().train(), four_samples(name)
    estimate, whole_profile = estimate_profile(model, batch, LOSSLESS), profile_model(model, batch, LOSSLESS)
    for action in ("retain", "recompute"):
        ours, real = uniform_policy(estimate, action), uniform_policy(whole_profile, action)
        assert ours.predicted_peak_bytes == pytest.approx(real.predicted_peak_bytes, rel=0.05)


def test_positions_of_images_come_first_and_are_never_cut():
    model, batch = TABLE["smolvlm"].build(), four_samples("smolvlm")
    moved, num_media = move_media_first(model, Batch(batch))
    sorted_batch = moved.tensors
    token = model.config.image_token_id
    is_media = (batch["input_ids"] == token).any(0)
    assert num_media == int(is_media.sum()) > 0
    assert (sorted_batch["input_ids"][:, :num_media] == batch["input_ids"][:, is_media]).all()
    assert torch.equal(sorted_batch["labels"][:, num_media:], batch["labels"][:, ~is_media])
    for part in (part.tensors for part in small_parts(moved, num_media)[0]):
        assert part["input_ids"].shape[1] > num_media
        assert len(part["pixel_values"]) == len(part["input_ids"])
    assert move_media_first(gpt2(), Batch(texts(2, 20, 20)))[1] == 0


def test_a_vision_tower_that_collects_hidden_states_is_traced_once(one_thread, monkeypatch):
    """A vision tower that collects hidden states is traced once.

    Transformers registers the collecting hooks once, also if runs outside of training come first. New hooks in each
    forward would fit no trace.
    """
    traced_scopes, original = [], guards.trace
    monkeypatch.setattr(guards, "trace", lambda *args: traced_scopes.append(1) or original(*args))
    model = TABLE["llava"].build().train()
    estimate_profile(model, four_samples("llava"), LOSSLESS)
    blocks = [m for m in model.modules() if type(m).__name__ in ("CLIPEncoderLayer", "LlamaDecoderLayer")]
    assert 0 < len(traced_scopes) <= len(blocks)


@pytest.mark.parametrize("profile", [estimate_profile, profile_model])
def test_what_a_profile_ran_on_is_freed_at_once(profile, one_thread):
    """Parts are freed at once by reference counts.

    Waiting for garbage collection would leave a step less memory by the size of a batch.
    """
    model, batch = gpt2(), {name: ids.clone() for name, ids in texts(4, 80, 80).items()}
    gc.collect()
    gc.disable()
    try:
        profile(model.train(), batch, LOSSLESS)
        tensor_refs = [weakref.ref(tensor) for tensor in batch.values()]
        del batch
        assert [ref() for ref in tensor_refs] == [None, None]
    finally:
        gc.enable()


def fake_part(elements):
    return Batch({"input_ids": torch.zeros(1, elements, dtype=torch.long)})


def test_the_time_of_a_profile_is_told_in_seconds_and_steps(gpt2_like_profile):
    """The first part took 2 s and its step 100 ms. The other parts have 2 and 3 times its elements."""
    first = replace(gpt2_like_profile(num_blocks=2), step_ms=100.0, head_ms=2.0, other_heads=())
    parts, whole = [fake_part(n) for n in (16, 32, 48)], fake_part(160)
    seconds, num_steps = predict_duration(parts, whole, first, first_seconds=2.0)
    assert seconds == pytest.approx(2.0 + 2.5 * 0.1 * 5)
    assert num_steps == pytest.approx(1e3 * seconds / ((plain_blocks_ms(first) + 2.0) * 10))
    slow = replace(first, step_ms=200.0)
    slow_seconds, slow_steps = predict_duration(parts, whole, slow, first_seconds=2.0)
    assert slow_steps / slow_seconds == pytest.approx(num_steps / seconds), "the measured step records its memory"
    assert describe_duration(3, 3.25, 4.3) == (
        "profiling takes about 3.2 s in all, as long as about 4 plain steps on this batch (estimated after 1 of 3 "
        "small parts of the batch)"
    )
    assert "steps" not in describe_duration(3, 1.0, 0.0)


def test_the_time_of_a_profile_is_announced_once(tiny_gpt2, token_batch, caplog, one_thread):
    estimate_profile(tiny_gpt2(), token_batch(8, 32), AdaccConfig())
    assert sum(message.startswith("Adacc: profiling takes about ") for message in caplog.messages) == 1


ROOT = Path(__file__).resolve().parents[3]
PROFILED = """
import json, sys, torch
from memory_meter import MemoryMeter
from transformers import T5Config, T5ForConditionalGeneration
from adacc_hf import AdaccConfig
from adacc_hf.price.estimated_profile import estimate_profile
torch.manual_seed(0)
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()
ids = torch.randint(1, 64, (4, int(sys.argv[1])))
budget = sys.argv[2] if sys.argv[2] == "auto" else int(sys.argv[2])
config = AdaccConfig(actions=("retain", "recompute"), head="plain", memory_budget=budget)
meter = MemoryMeter()
profile = estimate_profile(model, {"input_ids": ids, "labels": ids}, config)
print(json.dumps(meter.peak_bytes))
"""


def small_t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()


def small_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=64)).train()


def token_texts(samples, tokens):
    ids = torch.ones(samples, tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def num_tokens(batch):
    return sum(prod(shape.size) for shape in batch.shapes)


@pytest.mark.parametrize(("budget", "limit"), [("auto", None), (0.5, None), (1 << 30, 1 << 30), ("2GiB", 2 << 30)])
def test_only_a_budget_in_bytes_limits_profiling(budget, limit):
    assert peak_limit(AdaccConfig(memory_budget=budget)) == limit


@pytest.mark.parametrize("tokens", [8, 16, 24, 48, 64, 100])
@pytest.mark.parametrize("has_pairs", [True, False])
def test_short_texts_have_smaller_parts_too(tokens, has_pairs):
    larger, smaller = small_parts(Batch(token_texts(4 if has_pairs else 8, tokens)), has_pairs=has_pairs)
    assert num_tokens(smaller[-1]) < num_tokens(larger[-1])
    assert len({tuple(shape.size for shape in part.shapes) for part in smaller}) == len(smaller)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [8, 16, 24, 48, 64, 100])
def test_few_short_texts_have_small_parts_alone(samples, tokens):
    (parts,) = small_parts(Batch(token_texts(samples, tokens)))
    sizes = [part.tensors["input_ids"].shape for part in parts]
    assert len(set(sizes)) == len(sizes) == 5
    assert max(length for _, length in sizes) <= max(5, tokens // 2)


@pytest.mark.parametrize("samples", [1, 2, 4, 8, 40])
@pytest.mark.parametrize("tokens", [16, 64, 100])
@pytest.mark.parametrize("has_pairs", [True, False])
def test_the_first_part_is_at_most_a_quarter_of_the_batch(samples, tokens, has_pairs):
    whole = Batch(token_texts(samples, tokens))
    choices = small_parts(whole, has_pairs=has_pairs)
    smallest = min(num_tokens(parts[0]) for parts in choices)
    for before, parts in zip(choices, start_small(choices, whole), strict=True):
        assert len(parts) == len(before)
        assert num_tokens(parts[0]) <= max(FIRST_SHARE * num_tokens(whole), smallest)
        assert parts[1:] == before[1:]


@pytest.mark.parametrize("build", [small_t5, small_gpt2])
def test_larger_parts_are_predicted_to_take_more(build, one_thread):
    """Predictions order the parts, and decide from which list the parts are."""
    whole = Batch(token_texts(4 if build is small_t5 else 8, 64))
    choices = start_small(small_parts(whole, has_pairs=build is small_t5), whole)
    larger, smaller = choices
    first = measure_profile(build(), larger[0], LOSSLESS, TrainingStep(), Measurement())
    needs = [max(profiling_bytes(first, larger[0], part) for part in parts[1:]) for parts in choices]
    assert first.static_bytes < needs[1] < needs[0]
    assert parts_within(needs[0], first, choices) == larger
    profiled, *others = parts_within(needs[0] - 1, first, choices)
    assert profiled is larger[0]
    assert others == [part for part in smaller if part.shapes != profiled.shapes]
    assert parts_within(1, first, choices) == [profiled, *others]  # no list is smaller


def test_a_profile_from_smaller_parts_predicts_the_same_batch(monkeypatch, one_thread):
    """A small budget changes the profiled parts, but hardly the predicted bytes of the whole batch."""
    measured = []

    def measure(model, part, *args):
        measured[-1].append(num_tokens(part))
        return measure_profile(model, part, *args)

    monkeypatch.setattr(estimated_profile, "measure_profile", measure)
    profiles = []
    for budget in (1 << 40, 1 << 20):
        measured.append([])
        config = AdaccConfig(actions=("retain", "recompute"), head="plain", memory_budget=budget)
        profiles.append(estimate_profile(small_t5(), token_texts(4, 64), config))
    assert max(measured[1]) < max(measured[0])
    assert profiles[1].plain_stored_bytes == profiles[0].plain_stored_bytes
    assert profiles[1].outside_peak_bytes == pytest.approx(
        profiles[0].outside_peak_bytes, rel=0.05
    )  # a max of two sums


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's LD_PRELOAD")
@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs a C++ compiler")
def test_profiling_t5_stays_within_a_budget_that_smaller_parts_fit(tmp_path):
    """Without a limit, profiling takes more than this budget, which is below the peak of the batch under torch's
    checkpoint."""
    script = tmp_path / "profiled.py"
    script.write_text(PROFILED)
    peaks = {}
    for budget in ("auto", "2500000"):
        command = [sys.executable, str(ROOT / "tests/memory_meter"), str(script), "64", budget]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/memory_meter'}"}
        process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        peaks[budget] = json.loads(process.stdout.splitlines()[-1])
    assert peaks["2500000"] <= 2500000 < peaks["auto"]
