"""Blocks that torch's checkpoint runs twice count, gather and draw once per step, as in plain training."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from recomputed_models import recompute_all
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.solve.simple_policies import uniform_policy

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
    block.array, calls = numpy.ones(2), []

    def hook(module, args, output):
        calls.append(1)
        return output * (1 + 0.1 * len(calls))

    block.up.register_forward_hook(hook)


@pytest.mark.parametrize(
    "forward",
    [
        steered,
        from_history,
        from_a_dict,
        from_a_global,
        from_the_class,
        from_own_generators,
        from_a_numpy_array,
        from_a_hook,
    ],
)
def test_state_changes_as_in_plain_training(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    batch = toy_batch()
    SEEN.clear()
    plain = run_steps(toy_model(forward, setup=setup), batch, num_steps=6)
    SEEN.clear()
    model = toy_model(forward, setup=setup)
    profile = profile_model(model, batch, CONFIG)
    assert profile.kinds[0].untrusted
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch, num_steps=6), plain)


def test_a_change_that_begins_later_is_noticed(toy_model, toy_batch, run_steps, assert_same_steps):
    """A state change that begins after several steps is noticed."""

    def late(block, hidden):
        if SEEN:
            block.history.append(1)
        return close(block, hidden, block.up(hidden) * (1 + 0.1 * len(block.history)))

    batch, results = toy_batch(), []
    for is_plain in (True, False):
        SEEN.clear()
        model = toy_model(late, setup=setup)
        if is_plain:
            results.append([*run_steps(model, batch, num_steps=5), SEEN.append(1), *run_steps(model, batch)])
            continue
        with recompute_all(model, batch, CONFIG, CONFIG):
            results.append([*run_steps(model, batch, num_steps=5), SEEN.append(1), *run_steps(model, batch)])
    plain, ours = ([step for step in steps if step is not None] for steps in results)
    assert_same_steps(ours, plain)


def test_a_large_tensor_that_changes_late_is_refused(toy_model, toy_batch):
    """A large tensor that changes after several unchanged calls is refused, because its block keeps no copy any
    more."""

    def late(block, hidden):
        if SEEN:
            block.large.add_(1)
        return close(block, hidden, block.up(hidden))

    SEEN.clear()
    model = toy_model(late, setup=lambda block: block.register_buffer("large", torch.zeros(1 << 16)))
    with recompute_all(model, toy_batch(), CONFIG, CONFIG):
        for _ in range(3):
            model(**toy_batch()).loss.backward()
        SEEN.append(1)
        with pytest.raises(UnrestorableError, match="no copy to restore it from"):
            model(**toy_batch())


@pytest.mark.parametrize("wraps", [False, True])
def test_blocks_of_classes_that_are_named_too(run_steps, assert_same_steps, wraps, one_thread):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.load = nn.Linear(8, 8), nn.Linear(8, 8), None

        def forward(self, hidden):
            return steered(self, hidden)

    def build():
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList(Layer() for _ in range(2))
        if wraps:  # its own function in place of the class's
            for layer in model.layers:
                layer.forward = lambda hidden, layer=layer: steered(layer, hidden)

        def forward(x):
            for layer in model.layers:
                x = layer(x)
            return SimpleNamespace(loss=x.square().mean())

        model.forward = forward
        return model.train()

    batch = {"x": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))}
    config = AdaccConfig(block_classes=("Layer",), min_compress_bytes=0, actions=("retain", "recompute"))
    plain, model = run_steps(build(), batch), build()
    with recompute_all(model, batch, config, config):
        assert_same_steps(run_steps(model, batch), plain)
