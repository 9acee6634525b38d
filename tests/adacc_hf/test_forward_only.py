"""Numbers and hooks that stand in the forward only, and differ at every step: equal to plain training, or refused."""

from contextlib import suppress

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import CheckpointMismatchError, TapeMismatchError
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)
NUM_STEPS = 4
SCALES = {"factor": 1.0}


class Factor:
    value = 1.0


def forward(block, hidden):
    scale = block.scale * SCALES["factor"] * Factor.value * block.items[0]
    return hidden + block.down((block.up(hidden) * scale).tanh().exp())


def setup(block):
    block.scale, block.items = 1.0, [1.0]


def on_blocks(change):
    """Return a function that calls `change(block, number)` for every block."""
    return lambda model, number: [change(block, number) for block in model.layers]


def hook(block, number):
    block.up._forward_hooks.clear()
    if number != 1.0:
        block.up.register_forward_hook(lambda module, args, result: result * number)


def pre_hook(block, number):
    block.down._forward_pre_hooks.clear()
    if number != 1.0:
        block.down.register_forward_pre_hook(lambda module, args: (args[0] + number,))


STANDING = {
    "attribute": on_blocks(lambda block, number: setattr(block, "scale", number)),
    "whole number": on_blocks(lambda block, number: setattr(block, "scale", round(8 * number))),
    "item": on_blocks(lambda block, number: block.items.__setitem__(0, number)),
    "global number": lambda model, number: SCALES.update(factor=number),
    "class attribute": lambda model, number: setattr(Factor, "value", number),
    "hook": on_blocks(hook),
    "pre-hook": on_blocks(pre_hook),
}
"""Functions that put a number somewhere; the number between two steps is 1."""


def step(model, batch, standing, number):
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    standing(model, number)
    loss = model(**batch).loss
    standing(model, 1.0)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] * (name in ("attribute", "hook"))) for name in STANDING]
)
def test_what_stands_in_forward_only_never_changes_a_gradient_silently(toy_model, toy_batch, name):
    """Each step is exact until, in some cases, the run stops with words."""
    standing, model, batch = STANDING[name], toy_model(forward, setup=setup), toy_batch()
    numbers = [1.0 + number / 8 for number in range(1, NUM_STEPS + 1)]
    plain = [step(model, batch, standing, number) for number in numbers]
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    num_exact = 0
    with apply_policy(model, policy, CONFIG), suppress(CheckpointMismatchError, TapeMismatchError):
        for number, expected in zip(numbers, plain, strict=True):
            assert all(map(torch.equal, step(model, batch, standing, number), expected))
            num_exact += 1
    assert num_exact > 1
