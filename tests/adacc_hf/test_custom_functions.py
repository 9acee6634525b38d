"""Rule R6 for autograd Functions written in Python: their backward may write into their saved tensors.

`pytest -s tests/adacc_hf/test_custom_functions.py -k least` prints the peaks of the table in docs/SUPPORT.md.
"""

from functools import partial

import numpy as np
import pytest
import torch
from function_builders import ScaleInPlace, Square
from torch.utils.checkpoint import checkpoint

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)


class SquareIntoWhatItSaved(Square):
    """x * x, whose backward writes the result over x, unseen by the dispatcher and version counters."""

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        np.multiply(x.numpy(), 2 * gradient.numpy(), out=x.numpy())
        return x.clone()


square = SquareIntoWhatItSaved.apply


def before_a_replay_reads_it(block, hidden):
    """Run the square's backward before the layer's, whose replay computes exp from the square's saved tensor."""
    x = block.up(hidden)
    return hidden + block.down(x.tanh().exp()) + square(x)


def in_a_chain(block, hidden):
    """Chain squares, so that a square's saved tensor is the start of the next one's replay."""
    x = block.up(hidden)
    y = x * 0.5
    return hidden + block.down(y.sigmoid()) + square(y) + square(x)


def of_the_blocks_input(block, hidden):
    return block.down(hidden.tanh().exp()) + square(hidden * 1.0) + block.up(hidden)


def of_a_twin(block, hidden):
    """Pass two equal activations, stored once by a plan, to the square and the layer."""
    x = block.up(hidden)
    return hidden + block.down(x * 0.5) + square(x * 0.5)


def after_a_write_in_place(block, hidden):
    """Write into an activation by address, as rotary kernels do, and overwrite a saved tensor, as fused MLPs do."""
    x = ScaleInPlace.apply(block.up(hidden), 0.5)
    return hidden + block.down(x.sigmoid()) + square(x * 0.5)


FORWARDS = [before_a_replay_reads_it, in_a_chain, of_the_blocks_input, of_a_twin, after_a_write_in_place]


@pytest.mark.parametrize("forward", FORWARDS)
def test_what_a_function_overwrites_is_read_by_nobody_else(toy_model, toy_batch, assert_exact, forward):
    profile = assert_exact(toy_model(forward), toy_batch())
    assert any(value.recomputable for value in profile.kinds[0].activations)


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_copies_are_part_of_the_predicted_peak(toy_model, toy_batch, forward):
    model, batch = toy_model(forward), toy_batch(64)
    profile_model(model, batch, CONFIG)  # Dynamo keeps the state of a generator when it first traces a block
    profile = profile_model(model, batch, CONFIG)
    policies = [random_policy(profile, seed, ("retain", "recompute")) for seed in range(8)]
    for policy in [uniform_policy(profile, "recompute"), *policies]:
        with apply_policy(model, policy, CONFIG):
            for _ in range(3):
                model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            memory = measure_step(model, batch)
        assert memory.stored_bytes == policy.predicted_stored_bytes
        assert memory.peak_bytes == policy.predicted_peak_bytes


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_least_peak_is_no_higher_than_checkpointings(toy_model, toy_batch, forward):
    """Compare peaks of a step without the model itself, which does not depend on the policy."""
    model, batch = toy_model(forward, num_blocks=3), toy_batch(64)

    def peak():
        for _ in range(3):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        memory = measure_step(model, batch)
        return memory.peak_bytes - memory.static_bytes

    policy = least_policy(profile_model(model, batch, CONFIG), AdaccConfig(actions=("retain", "recompute")))
    with apply_policy(model, policy, CONFIG):
        least = peak()
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    checkpointing = peak()
    print(f"\n{forward.__name__}: least peak {least / checkpointing:.2f} of torch's checkpoint")
    assert least <= checkpointing


def test_a_tensor_asked_for_outside_of_backward_is_a_copy(toy_model, toy_batch):
    """A saved tensor read outside of backward is a copy. Writing into it does not change backward."""
    model, batch = toy_model(before_a_replay_reads_it), toy_batch()
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    model(**batch).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with apply_policy(model, policy, CONFIG):
        model.zero_grad()
        loss = model(**batch).loss
        nodes, visited = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in visited:
                visited.add(node)
                nodes.extend(parent for parent, _ in node.next_functions)
        (custom, *_) = [node for node in visited if "SquareIntoWhatItSaved" in node.name()]
        custom.saved_tensors[0].zero_()
        loss.backward()
    assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))
