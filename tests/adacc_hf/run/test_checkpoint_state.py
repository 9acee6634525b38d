"""Blocks that torch's checkpoint runs twice count, gather and draw once per step, as in plain training."""

import math
import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from recomputed_models import recompute_all
from torch import nn

from adacc_hf import AdaccConfig, AdaccSession, apply_policy, profile_model
from adacc_hf.artifacts.errors import CheckpointMismatchError, UnrestorableError
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0, actions=("retain", "recompute"))
SEEN = []


def close(block, hidden, x):
    return hidden + block.down(x.tanh()) * (1.0 if hidden.sum().item() > 0 else 0.5)


def steered(block, hidden):
    """Count the load anew from None in each step, as experts' loads steer their router."""
    x = block.up(hidden)
    load = x.detach().mean((0, 1))
    block.load = load if block.load is None else block.load + load
    return close(block, hidden, x * block.load.sigmoid())


def from_history(block, hidden):
    block.history.append(hidden.detach().mean())
    return close(block, hidden, block.up(hidden) * (1 + 0.1 * len(block.history) + block.history[-1]))


def from_a_dict(block, hidden):
    counts = block.state["counts"]
    counts["n"] = counts.get("n", 0) + 1
    return close(block, hidden, block.up(hidden) * (1 + 0.1 * counts["n"]))


def from_a_global(block, hidden):
    SEEN.append(1)
    return close(block, hidden, block.up(hidden) * (1 + 0.1 * len(SEEN)))


def from_the_class(block, hidden):
    type(block).calls = getattr(type(block), "calls", 0) + 1
    return close(block, hidden, block.up(hidden) * (1 + 0.1 * type(block).calls))


def from_own_generators(block, hidden):
    mask = torch.rand(hidden.shape, generator=block.tools.generators["mask"]) > 0.3
    scale = block.tools.numpy.random() + block.tools.python.random()
    return close(block, hidden, block.up(hidden) * mask * scale)


def from_a_numpy_array(block, hidden):
    block.array[:] = block.array + 1
    return close(block, hidden, block.up(hidden) * float(block.array.sum()))


def from_a_hook(block, hidden):
    return close(block, hidden, block.up(hidden))


def setup(block):
    block.load, block.history, block.state = None, [], {"counts": {}}
    block.tools = SimpleNamespace(
        generators={"mask": torch.Generator().manual_seed(1)},
        numpy=numpy.random.default_rng(1),
        python=random.Random(1),
    )
    block.array = numpy.ones(2)


def setup_with_hook(block):
    setup(block)
    calls = []

    def hook(module, args, output):
        calls.append(1)
        return output * (1 + 0.1 * len(calls))

    block.up.register_forward_hook(hook)


SEEN_CHANGES = [steered, from_history, from_a_dict, from_own_generators, from_a_numpy_array]


def checkpointed(toy_model, toy_batch, forward):
    """Return (model, handle of a policy that checkpoints what may run twice). Another model is profiled."""
    set_up = setup_with_hook if forward is from_a_hook else setup
    profile = profile_model(toy_model(forward, setup=set_up), toy_batch(), CONFIG)
    assert profile.kinds[0].untrusted
    SEEN.clear()
    model = toy_model(forward, setup=set_up)
    return model, apply_policy(model, uniform_policy(profile, "recompute"), CONFIG)


@pytest.mark.parametrize("forward", SEEN_CHANGES)
def test_state_changes_in_a_session_as_in_plain_training(toy_model, toy_batch, forward):
    """In the first step too, which runs under torch's checkpoint."""
    batch, weights = toy_batch(), []
    for is_plain in (True, False):
        model = toy_model(forward, setup=setup)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = None if is_plain else AdaccSession(model, optimizer, memory_budget=1.0, exact=True)
        torch.manual_seed(0)
        for _ in range(4):
            with nullcontext() if session is None else session.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if session is not None:
            assert session.policy is not None
            session.close()
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(("forward", "runs_once"), [(steered, False), (from_history, True)])
def test_a_block_whose_state_cannot_be_restored_keeps_its_tensors(toy_model, toy_batch, forward, runs_once, caplog):
    profile = profile_model(toy_model(forward, setup=setup), toy_batch(), CONFIG)
    assert (BlockAction.CHECKPOINT not in profile.kinds[0].block_actions) is runs_once
    assert ("forward changes history" in caplog.text) is runs_once


@pytest.mark.parametrize("forward", [from_a_global, from_the_class, from_a_hook])
def test_state_that_is_not_seen_ends_training_if_numbers_depend_on_it(toy_model, toy_batch, forward):
    model, handle = checkpointed(toy_model, toy_batch, forward)
    with handle, pytest.raises(CheckpointMismatchError, match="gives other numbers"):
        model(**toy_batch()).loss.backward()


def test_a_value_that_changes_later_is_restored(toy_model, toy_batch, run_steps, assert_same_steps):
    def late(block, hidden):
        if SEEN:
            block.count = block.count + 1
        return close(block, hidden, block.up(hidden) * (1 + 0.1 * block.count))

    batch, results = toy_batch(), []
    for is_plain in (True, False):
        SEEN.clear()
        model = toy_model(late, setup=lambda block: setattr(block, "count", 0))
        with nullcontext() if is_plain else recompute_all(model, batch, CONFIG, CONFIG):
            results.append([*run_steps(model, batch, num_steps=5), SEEN.append(1), *run_steps(model, batch)])
    plain, ours = ([step for step in steps if step is not None] for steps in results)
    assert_same_steps(ours, plain)


@pytest.mark.parametrize("change", [lambda block: block.large.add_(1), lambda block: block.history.append(1)])
def test_a_change_in_place_that_begins_later_is_refused(toy_model, toy_batch, change):
    def late(block, hidden):
        if SEEN:
            change(block)
        return close(block, hidden, block.up(hidden))

    def set_up(block):
        block.history = []
        block.register_buffer("large", torch.zeros(1 << 16))

    SEEN.clear()
    model = toy_model(late, setup=set_up)
    with recompute_all(model, toy_batch(), CONFIG, CONFIG):
        for _ in range(3):
            model(**toy_batch()).loss.backward()
        SEEN.append(1)
        with pytest.raises(UnrestorableError, match="no copy to restore it from"):
            model(**toy_batch())


def test_a_traced_block_runs_its_graph_in_backward(toy_model, toy_batch, run_steps, assert_same_steps):
    """The block's Python code runs once per step, and its buffers change once."""

    def normalizes(block, hidden):
        return hidden + block.down(block.norm(block.up(hidden)).tanh())

    def set_up(block):
        block.norm = nn.BatchNorm1d(6)

    batch, calls = toy_batch(), []
    plain = run_steps(toy_model(normalizes, setup=set_up), batch)
    model = toy_model(normalizes, setup=set_up)
    with apply_policy(model, checkpoint_policy(profile_model(model, batch, CONFIG)), CONFIG):
        sys.setprofile(lambda frame, event, _: calls.append(event) if frame.f_code is normalizes.__code__ else None)
        try:
            ours = run_steps(model, batch)
        finally:
            sys.setprofile(None)
    assert_same_steps(ours, plain)
    assert calls.count("call") == 3 * len(model.layers)


def test_a_traced_block_runs_no_graph_of_another_zero(toy_model, toy_batch, run_steps, assert_same_steps):
    """Dynamo's guards compare by ==, so 0.0 and -0.0 pass alike."""

    def signed(block, hidden):
        return hidden + block.down(block.up(hidden) * math.copysign(1.0, block.zero))

    batch, results = toy_batch(), []
    for is_plain in (True, False):
        model = toy_model(signed, setup=lambda block: setattr(block, "zero", 0.0))
        policy = None if is_plain else checkpoint_policy(profile_model(model, batch, CONFIG))
        with nullcontext() if policy is None else apply_policy(model, policy, CONFIG):
            steps = run_steps(model, batch)
            for block in model.layers:
                block.zero = -0.0
            results.append(steps + run_steps(model, batch))
    assert_same_steps(*reversed(results))
