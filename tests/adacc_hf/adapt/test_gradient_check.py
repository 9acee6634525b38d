"""Gradient checks: the error, runs of a block's graph that leave no trace, and their memory."""

from __future__ import annotations

import logging
import math
import random
import sys

import pytest
import torch
from recomputed_models import recompute_all
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.adapt.gradient_check import BlockSample, check_peaks, gradient_error
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.tracking import Tracking
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step, static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter


@pytest.mark.parametrize("exact", [[], [None], [torch.zeros(3)], [torch.tensor([1.0, math.nan])]])
def test_a_gradient_that_is_zero_or_not_finite_anyway_says_nothing(exact):
    assert gradient_error(exact, [None if e is None else torch.ones_like(e) for e in exact]) is None


@pytest.mark.parametrize("degraded", [math.nan, math.inf])
def test_a_gradient_that_only_compression_makes_non_finite_is_infinitely_wrong(degraded):
    other = [torch.ones(2), torch.tensor([1.0, degraded, 1.0])]
    assert gradient_error([torch.ones(2), torch.ones(3)], other) == math.inf


CONFIG = AdaccConfig(min_compress_bytes=0)
SEEN = []


def tail(block, hidden, x):
    return hidden + block.down(x.tanh())


def reentrant(block, hidden):
    return tail(block, hidden, checkpoint(lambda x: block.up(x).sigmoid(), hidden, use_reentrant=True))


def plain(block, hidden):
    return tail(block, hidden, block.up(hidden))


def normalizes(block, hidden):
    return tail(block, hidden, block.norm(block.up(hidden)))


def counts(block, hidden):
    block.num_calls += 1
    block.loads[0] += 1
    block.load = hidden.detach().sum() if block.load is None else block.load + hidden.detach().sum()
    SEEN.append(block.num_calls)
    return tail(block, hidden, block.up(hidden) * (1 + 0.1 * block.num_calls))


def writes(block, hidden):
    with torch.no_grad():
        block.count += 1
        block.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
    return tail(block, hidden, block.up(hidden) + block.mean.clone())


def setup(block):
    block.norm = nn.BatchNorm1d(6)
    block.num_calls, block.load, block.loads = 0, None, [0]
    block.register_buffer("count", torch.zeros(()))
    block.mean = torch.zeros(8)
    block.up.register_forward_hook(lambda module, args, output: block.loads.append(1))


def traces(model):
    state = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    state |= {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}
    for index, block in enumerate(model.layers):
        state[index] = [
            block.num_calls,
            None if block.load is None else float(block.load),
            list(block.loads),
            block.mean.tolist(),
        ]
    return state, list(SEEN), torch.get_rng_state().tolist(), random.getstate()


@pytest.mark.parametrize("forward", [normalizes, plain, reentrant, counts, writes])
def test_a_comparison_runs_the_traced_graph_and_leaves_no_trace(toy_model, toy_batch, forward, caplog):
    """No code of the block runs. A block whose operators no traced graph has is not compared."""
    SEEN.clear()
    model, batch, has_graph = toy_model(forward, setup=setup), toy_batch(), forward is not reentrant

    def runs_code(run):
        called = set()
        sys.setprofile(lambda frame, *_: called.add(frame.f_code))
        try:
            run()
        finally:
            sys.setprofile(None)
        return forward.__code__ in called

    with recompute_all(model, batch, CONFIG, CONFIG) as handle:
        for number in range(1 if forward in (counts, writes) else 2):  # these are traced anew
            sample = BlockSample(handle.plans.strategies["layers.1"])
            assert runs_code(lambda: model(**batch).loss.backward())
            if number:
                model.zero_grad(set_to_none=True)
            before = traces(model)
            for _ in range(2):
                assert not runs_code(sample.compare)
                error = sample.compare()
                assert error == (0 if has_graph else None)
            sample.close()
            assert traces(model) == before
    assert has_graph or "Dynamo has traced no graph with the operators of its call" in caplog.text


def cross(block, hidden, memory, table):
    return tail(block, hidden, block.up(hidden) + memory * table["scale"])


def test_keyword_arguments_with_a_gradient_lead_nowhere(toy_model, toy_batch):
    """Gradients of keyword arguments, such as an encoder's output, are not followed: their graph is freed."""
    outside, batch = nn.Linear(8, 8), toy_batch()

    def kwargs_of(x):
        return {"memory": outside(x).tanh(), "table": {"scale": outside.weight.sum().exp()}}

    model = toy_model(cross, kwargs_of=kwargs_of)
    model.outside = outside
    with recompute_all(model, batch, CONFIG, CONFIG) as handle:
        sample = BlockSample(handle.plans.strategies["layers.1"])
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        assert sample.compare() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("uses_saved", [False, True])
def test_a_graph_from_before_the_block_is_left_alone(toy_model, toy_batch, caplog, uses_saved):
    """The graph before the block is not run: outside parameters keep their gradients."""
    outside, batch = nn.Linear(8, 8), toy_batch()

    def reads_context(block, hidden):
        context = block.context[0]
        return tail(block, hidden, block.up(hidden) * (context.exp() if uses_saved else 1.0) + context)

    model = toy_model(reads_context)
    model.outside, inner = outside, model.forward
    contexts = [None]
    for block in model.layers:
        block.context = contexts

    def forward(x):
        contexts[0] = outside.bias.exp() if uses_saved else outside.bias + 1
        return inner(x)

    model.forward = forward
    profile = profile_model(model, batch, CONFIG)
    with apply_policy(model, uniform_policy(profile, "retain"), CONFIG) as handle:
        sample = BlockSample(handle.plans.strategies["layers.1"])
        model(**batch).loss.backward()
        before = outside.bias.grad.clone()
        with caplog.at_level(logging.WARNING, "adacc_hf"):
            error = sample.compare()
    assert (error is None) is uses_saved
    assert ("are not its arguments" in caplog.text) is uses_saved
    assert torch.equal(outside.bias.grad, before)


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
    fitted = [getattr(codec, "outliers", None) for entry in entries for codec in entry.codecs.values()]
    return sum(outliers.indices.nbytes + outliers.keep.nbytes for outliers in fitted if outliers is not None)


def settle(model, batch):
    """Run the first two calls of a block, which are recorded and take extra memory."""
    for _ in range(2):
        measure_step(model, batch)


@pytest.mark.parametrize("action", ["compress", "recompute"])
def test_a_sample_and_its_comparison_take_no_more_than_predicted(case, action):
    model, batch, profile = case
    policy = uniform_policy(profile, action)
    peaks = check_peaks(profile, policy)
    assert list(peaks) == [block.name for block in profile.blocks]
    with PolicyHandle(model, policy) as handle:
        settle(model, batch)
        for name, peak in peaks.items():
            sample = BlockSample(handle.plans.strategies[name])
            in_step = measure_step(model, batch).peak_bytes
            with MemoryMeter.for_device(torch.device("cpu")) as meter:
                assert sample.compare() is not None
                sample.close()
            after = static_bytes(model, batch, None) + 2 * INPUT_BYTES + meter.peak_bytes
            assert max(in_step - fitted_bytes(handle) - SCALARS, after) <= peak, name
            # The block may hold its own input and gradient at its peak anyway. Only a part of the held gradients is
            # live at the peak of the block's backward.
            assert peak <= max(in_step + 2 * INPUT_BYTES, 1.1 * after), name


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
