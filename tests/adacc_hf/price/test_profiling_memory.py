"""Profiling under a budget in bytes: parts that are predicted to exceed the budget are replaced by smaller parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from adacc_hf import AdaccConfig
from adacc_hf.price import estimated_profile
from adacc_hf.price.batch_subsampling import Batch, small_parts
from adacc_hf.price.estimated_profile import estimate_profile
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profiling_memory import FIRST_SHARE, parts_within, peak_limit, profiling_bytes, start_small
from adacc_hf.price.training_step import TrainingStep

ROOT = Path(__file__).resolve().parents[3]
LOSSLESS = AdaccConfig(actions=("retain", "recompute"), head="plain")

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


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=64)).train()


def texts(samples, tokens):
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
    larger, smaller = small_parts(Batch(texts(4 if has_pairs else 8, tokens)), has_pairs=has_pairs)
    assert num_tokens(smaller[-1]) < num_tokens(larger[-1])
    assert len({tuple(shape.size for shape in part.shapes) for part in smaller}) == len(smaller)


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [8, 16, 24, 48, 64, 100])
def test_few_short_texts_have_small_parts_alone(samples, tokens):
    (parts,) = small_parts(Batch(texts(samples, tokens)))
    sizes = [part.tensors["input_ids"].shape for part in parts]
    assert len(set(sizes)) == len(sizes) == 5
    assert max(length for _, length in sizes) <= max(5, tokens // 2)


@pytest.mark.parametrize("samples", [1, 2, 4, 8, 40])
@pytest.mark.parametrize("tokens", [16, 64, 100])
@pytest.mark.parametrize("has_pairs", [True, False])
def test_the_first_part_is_at_most_a_quarter_of_the_batch(samples, tokens, has_pairs):
    whole = Batch(texts(samples, tokens))
    choices = small_parts(whole, has_pairs=has_pairs)
    smallest = min(num_tokens(parts[0]) for parts in choices)
    for before, parts in zip(choices, start_small(choices, whole), strict=True):
        assert len(parts) == len(before)
        assert num_tokens(parts[0]) <= max(FIRST_SHARE * num_tokens(whole), smallest)
        assert parts[1:] == before[1:]


@pytest.mark.parametrize("build", [t5, gpt2])
def test_larger_parts_are_predicted_to_take_more(build, one_thread):
    """Predictions order the parts, and decide from which list the parts are."""
    whole = Batch(texts(4 if build is t5 else 8, 64))
    choices = start_small(small_parts(whole, has_pairs=build is t5), whole)
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

    def measure(model, part, *args, **kwargs):
        measured[-1].append(num_tokens(part))
        return measure_profile(model, part, *args, **kwargs)

    monkeypatch.setattr(estimated_profile, "measure_profile", measure)
    profiles = []
    for budget in (1 << 40, 1 << 20):
        measured.append([])
        config = AdaccConfig(actions=("retain", "recompute"), head="plain", memory_budget=budget)
        profiles.append(estimate_profile(t5(), texts(4, 64), config))
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
