"""Moments of a measured step, and the corrections that a profile learns from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.price.memory_profile import (
    AFTER,
    FORWARD,
    HEAD_AND_LOSS,
    OPTIMIZER,
    StepMarker,
    missing_bytes,
    moment_peaks,
    predicted_peaks,
    with_missing_bytes,
)
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import CpuMemoryMeter, MemoryPoint, count_static_bytes

IDS = torch.randint(0, 61, (4, 24), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
BLOCKS = ["transformer.h.0", "transformer.h.1"]
MOMENTS = [FORWARD, HEAD_AND_LOSS, *BLOCKS, AFTER, OPTIMIZER]


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


@pytest.fixture(scope="module")
def profile():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return profile_model(model, BATCH, AdaccConfig(head="plain"), optimizer, optimizer_step_bytes=1000)


def points(*marks: tuple[str, ...]) -> list[MemoryPoint]:
    """Return a function of marks, after each of which more is live: 1 byte after the first, 2 after the second ..."""
    return [MemoryPoint(mark, 0, number) for number, mark in enumerate(marks, start=1)]


def test_moments_of_two_micro_batches_and_the_optimizer():
    micro = [("leave", "a"), ("leave", "b"), ("backward", "b"), ("backward", "a"), ("tail", "a")]
    peaks = moment_peaks(points(("start",), ("step",), *micro, *micro, (OPTIMIZER,)))
    assert peaks == {FORWARD: 8, HEAD_AND_LOSS: 9, "b": 10, "a": 11, AFTER: 12, OPTIMIZER: 13}


def test_an_optimizer_that_steps_while_backward_runs_belongs_to_the_block():
    peaks = moment_peaks(
        points(("step",), ("backward", "b"), (OPTIMIZER,), ("backward", "a"), (OPTIMIZER,), ("tail", "a"))
    )
    assert peaks == {FORWARD: 1, "b": 3, "a": 5, AFTER: 6}


@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_a_step_is_what_was_predicted_at_every_moment(profile, action):
    model, policy = make_model(), uniform_policy(profile, action)
    with apply_policy(model, policy) as handle:
        for _ in range(3):  # the first two are recorded, which takes extra memory
            static = count_static_bytes(model, BATCH)
            with CpuMemoryMeter() as meter:
                meter.mark(("step",))
                marks = StepMarker(handle.installation.functions, meter)
                model(**BATCH).loss.backward()
                marks.remove()
            model.zero_grad()
        strategies = [function.strategy for function in handle.installation.functions.values()]
        assert strategies == list(handle.plans.strategies.values()), "nothing is marked any more"
    measured_peaks = {moment: static + peak for moment, peak in moment_peaks(meter.points).items()}
    predicted = predicted_peaks(profile, policy)
    assert predicted.pop(OPTIMIZER) > 0
    assert measured_peaks == predicted
    assert missing_bytes(profile, policy, measured_peaks) == {}


@given(extra=st.lists(st.integers(-5000, 5000), min_size=len(MOMENTS), max_size=len(MOMENTS)))
def test_what_was_missing_is_predicted_from_then_on(profile, extra):
    policy, other = uniform_policy(profile, "recompute"), uniform_policy(profile, "retain")
    measured_peaks = {m: predicted_peaks(profile, policy)[m] + more for m, more in zip(MOMENTS, extra, strict=True)}
    missing = missing_bytes(profile, policy, measured_peaks)
    assert missing == {m: more for m, more in zip(MOMENTS, extra, strict=True) if more > 0}
    learnt = with_missing_bytes(profile, missing)
    for each in (policy, other):
        before, after = predicted_peaks(profile, each), predicted_peaks(learnt, each)
        assert all(after[m] == before[m] + missing.get(m, 0) for m in MOMENTS)


def test_every_head_learns_the_same(profile):
    chunked = profile_model(make_model(), BATCH, AdaccConfig())
    learnt = with_missing_bytes(chunked, {FORWARD: 50, HEAD_AND_LOSS: 100, BLOCKS[1]: 10, AFTER: 1})
    for name in chunked.heads:
        plain, more = chunked.with_head(name), learnt.with_head(name)
        assert more.blocks[0].forward_base_bytes == plain.blocks[0].forward_base_bytes + 50
        assert more.outside_peak_bytes == plain.outside_peak_bytes + 100
        assert more.loss_peak_bytes == plain.loss_peak_bytes + 100
        bases = zip(plain.blocks, more.blocks, strict=True)
        assert [after.backward_base_bytes - before.backward_base_bytes for before, after in bases] == [0, 10]
        assert more.tail_peak_bytes == plain.tail_peak_bytes + 1
