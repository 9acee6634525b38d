"""Profiling under a budget in bytes: parts that are predicted to exceed the budget are replaced by smaller parts."""

from __future__ import annotations

from math import prod

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from adacc_hf import AdaccConfig
from adacc_hf.price import estimated_profile
from adacc_hf.price.batch_subsampling import Batch, small_parts
from adacc_hf.price.estimated_profile import estimate_profile
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.profiling_memory import FIRST_SHARE, parts_within, peak_limit, profiling_bytes, start_small
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.torch_glue.memory import MemoryMeter

LOSSLESS = AdaccConfig(actions=("retain", "recompute"), head="plain")
HUGE = 1 << 50


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=64)).train()


def texts(samples, tokens):
    ids = torch.randint(1, 64, (samples, tokens))
    return {"input_ids": ids, "labels": ids}


def num_tokens(batch):
    return sum(prod(shape.size) for shape in batch.shapes)


def parts_of_profile(monkeypatch, model, batch, budget):
    """Return the parts that a profile of `batch` measures under `budget`."""
    parts = []

    def measure(model, part, *args):
        parts.append(part)
        return measure_profile(model, part, *args)

    monkeypatch.setattr(estimated_profile, "measure_profile", measure)
    estimate_profile(model, batch, AdaccConfig(actions=("retain", "recompute"), head="plain", memory_budget=budget))
    return parts


@pytest.mark.parametrize(
    ("budget", "limit"), [("auto", None), (0.5, None), (1 << 30, 1 << 30), ("2GiB", 2 << 30)]
)
def test_only_a_budget_in_bytes_limits_profiling(budget, limit):
    assert peak_limit(AdaccConfig(memory_budget=budget)) == limit


@pytest.mark.parametrize("build", [t5, gpt2])
def test_the_prediction_is_not_below_the_measured_peak(build, one_thread):
    model, step = build(), TrainingStep()
    choices = small_parts(Batch(texts(4, 64)), has_pairs=build is t5)
    profiled = choices[-1][0]
    profile = measure_profile(model, profiled, LOSSLESS, step, Measurement())
    for part in (part for parts in choices for part in parts[1:]):
        reading = MemoryOnlyMeasurement(Measurement())
        meter = MemoryMeter.for_device(torch.device("cpu"))
        reading.meter = lambda device: NoMeter()  # a process has one meter of the CPU at a time
        with meter:
            live_bytes = sum(parameter.nbytes for parameter in model.parameters()) + part.nbytes
            record_only(model, part, step, reading)
        assert meter.peak_bytes + live_bytes <= 1.05 * profiling_bytes(profile, profiled, part)
