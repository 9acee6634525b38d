"""Memory of steps that hold a block's input and gradient for comparison."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.adapt.gradient_check import BlockSample, comparison_peaks, peaks_with_samples
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.tracking import Tracking
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step, static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter

NUM_LAYERS = 5
INPUT_BYTES = 8 * 32 * 64 * 4
SCALARS = 2_000
"""Bytes of scalars that the simulator does not count, of several megabytes."""


@pytest.fixture(scope="module")
def case():
    """A model, a batch and their profile."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", "use_cache": False}
    sizes = {"n_layer": NUM_LAYERS, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 97}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens)).train()
    ids = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, profile_model(model, batch, AdaccConfig(min_compress_bytes=4096))


def tracking_of(handle, profile, policy, config):
    """Return a tracking under a policy that stays, although tracking steps change the corrections."""
    run = RunState(config, None, handle.installation.model, None, TrainingLoop())
    choice = PolicyChoice(handle, run)
    choice.add(profile, policy)
    choice.refresh = lambda record: setattr(record, "version", run.corrections.version)
    return Tracking(choice, run, 0)


def fitted_bytes(handle):
    """Return the bytes of the channels that the codecs have chosen, which a tracking step chooses again. The simulator
    does not count them, and the measurement does not see that the earlier ones are freed."""
    entries = [entry for strategy in handle.plans.strategies.values() for entry in strategy.entries.recorded.values()]
    fitted = [getattr(codec, "_outliers", None) for entry in entries for codec in entry.codecs.values()]
    return sum(outliers.indices.nbytes + outliers.keep.nbytes for outliers in fitted if outliers is not None)


def settle(model, batch):
    """Run the first two calls of a block, which are recorded and take extra memory."""
    for _ in range(2):
        measure_step(model, batch)


@pytest.mark.parametrize("action", ["compress", "recompute"])
def test_a_step_with_a_sample_takes_no_more_than_predicted(case, action):
    model, batch, profile = case
    policy = uniform_policy(profile, action)
    peaks = peaks_with_samples(profile, policy)
    assert list(peaks) == [block.name for block in profile.blocks]
    measured_peaks = {}
    with PolicyHandle(model, policy) as handle:
        tracking = tracking_of(handle, profile, policy, AdaccConfig(min_compress_bytes=4096))
        settle(model, batch)
        for name in peaks:
            tracking.start()  # of lossy blocks, samples one after the other in this order
            sample = BlockSample(handle.plans.strategies[name]) if action == "recompute" else None
            assert handle.plans.strategies[name].observer is not None
            measured_peaks[name] = measure_step(model, batch).peak_bytes
            if sample is not None:
                sample.close()
            tracking.finish()
        fitted = fitted_bytes(handle)
    assert all(measured_peaks[name] <= peaks[name] + fitted + SCALARS for name in peaks), (measured_peaks, peaks)
    # The prediction errs by the block's own input and gradient at most, which it may hold at its peak anyway.
    assert all(peaks[name] <= measured_peaks[name] + 2 * INPUT_BYTES for name in peaks), (measured_peaks, peaks)


@pytest.mark.parametrize("action", ["compress", "recompute"])
def test_a_comparison_takes_no_more_than_predicted(case, action):
    model, batch, profile = case
    policy = uniform_policy(profile, action)
    peaks = comparison_peaks(profile)
    with apply_policy(model, policy) as handle:
        settle(model, batch)
        for name in peaks:
            sample = BlockSample(handle.plans.strategies[name])
            measure_step(model, batch)
            with MemoryMeter.for_device(torch.device("cpu")) as meter:
                assert sample.compare() is not None
                sample.close()
            before = static_bytes(model, batch, None) + 2 * INPUT_BYTES
            assert before + meter.peak_bytes <= peaks[name], name
            # Only a part of the held gradients is live at the peak of the block's backward.
            assert peaks[name] <= 1.1 * (before + meter.peak_bytes), name


def test_only_blocks_that_the_budget_has_room_for_are_sampled(case):
    model, batch, profile = case
    sampled_blocks = {}
    plain = uniform_policy(profile, "compress").predicted_peak_bytes
    for extra in (0, INPUT_BYTES, 3 * INPUT_BYTES):
        config = AdaccConfig(min_compress_bytes=4096, memory_budget=plain + extra)
        policy = uniform_policy(profile, "compress")
        sampled_blocks[extra] = set()
        with PolicyHandle(model, policy) as handle:
            tracking = tracking_of(handle, profile, policy, config)
            settle(model, batch)
            for _ in range(NUM_LAYERS):
                tracking.start()
                strategies = handle.plans.strategies
                sampled_blocks[extra] |= {name for name in strategies if strategies[name].observer is not None}
                assert measure_step(model, batch).peak_bytes <= plain + extra + fitted_bytes(handle) + SCALARS
                tracking.finish()
    assert sampled_blocks[0] <= sampled_blocks[INPUT_BYTES] <= sampled_blocks[3 * INPUT_BYTES]
    assert len(sampled_blocks[3 * INPUT_BYTES]) == NUM_LAYERS
