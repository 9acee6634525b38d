"""Moments of a measured step, and the corrections that a profile learns from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Wav2Vec2Config, Wav2Vec2ForCTC

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
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import count_static_bytes
from adacc_hf.torch_glue.meters import CpuMemoryMeter, MemoryPoint

IDS = torch.randint(0, 61, (4, 24), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
BLOCKS = ["transformer.h.0", "transformer.h.1"]
MOMENTS = [FORWARD, HEAD_AND_LOSS, *BLOCKS, AFTER, OPTIMIZER]


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)).train()


def model_of_speech() -> Wav2Vec2ForCTC:
    """Return a model whose first blocks are frozen, and which has trained modules between these and the others."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(
        vocab_size=32, layerdrop=0.0, mask_time_prob=0.0, **sizes, **convolutions, **norms, hidden_dropout=0.0
    )
    model = Wav2Vec2ForCTC(config).train()
    model.freeze_feature_encoder()
    return model


@pytest.fixture(scope="module")
def profile():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return profile_model(model, BATCH, AdaccConfig(head="plain"), optimizer, optimizer_step_bytes=1000)


def peaks_of_third_step(handle: PolicyHandle, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the measured peak of each moment. The first two steps are recorded, which takes extra memory."""
    for _ in range(3):
        static = count_static_bytes(model, batch)
        with CpuMemoryMeter() as meter:
            meter.mark(("step",))
            marks = StepMarker(handle.installation.calls, meter)
            model(**batch).loss.backward()
            marks.remove()
        model.zero_grad()
    return {moment: static + peak for moment, peak in moment_peaks(meter.points).items()}


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


def test_an_optimizer_that_runs_forward_and_backward_itself_is_no_moment():
    """Lightning's optimizer steps with a closure, and torch calls the hook before the closure."""
    micro = [("leave", "a"), ("backward", "a"), ("tail", "a")]
    assert moment_peaks(points(("step",), (OPTIMIZER,), *micro)) == {FORWARD: 2, HEAD_AND_LOSS: 3, "a": 4, AFTER: 5}
    assert moment_peaks(points(("step",), (OPTIMIZER,), ("leave", "a"))) == {FORWARD: 2, HEAD_AND_LOSS: 3}


def test_moments_are_measured_although_the_policy_changes_within_the_step(profile):
    """Micro-batches of other sizes may follow other policies."""
    model = make_model()
    with apply_policy(model, uniform_policy(profile, "recompute")) as handle, CpuMemoryMeter() as meter:
        meter.mark(("step",))
        marks = StepMarker(handle.installation.calls, meter)
        for action in ("retain", "recompute", "retain"):
            handle.follow(handle.prepare(uniform_policy(profile, action)))
            model(**BATCH).loss.backward()
        marks.remove()
    labels = [point.label for point in meter.points]
    assert [labels.count(("backward", block)) for block in BLOCKS] == [3, 3]
    assert moment_peaks(meter.points).keys() == {FORWARD, HEAD_AND_LOSS, *BLOCKS, AFTER}


@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_modules_between_frozen_and_trained_blocks_are_predicted(action):
    """Their backward follows that of all blocks, and does not belong to the first trained block."""
    torch.manual_seed(0)
    batch = {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 32, (2, 5))}
    profile = profile_model(model_of_speech(), batch, AdaccConfig(head="plain"))
    assert profile.tail_peak_bytes > profile.static_bytes
    policy, model = uniform_policy(profile, action), model_of_speech()
    with apply_policy(model, policy) as handle:
        measured_peaks = peaks_of_third_step(handle, model, batch)
    predicted = predicted_peaks(profile, policy)
    assert measured_peaks[AFTER] == predicted[AFTER]
    assert measured_peaks["wav2vec2.encoder.layers.0"] == predicted["wav2vec2.encoder.layers.0"]


@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_a_step_is_what_was_predicted_at_every_moment(profile, action):
    model, policy = make_model(), uniform_policy(profile, action)
    with apply_policy(model, policy) as handle:
        measured_peaks = peaks_of_third_step(handle, model, BATCH)
        assert not any(call.observer for call in handle.installation.calls.values()), "nothing is marked any more"
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
