"""Python values that blocks read, changed during training: each value has its own tapes (rules R1 and R8)."""

import logging

import numpy as np
import pytest
import torch
from recomputed_models import recompute_all
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.run.entries import VARYING
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.guards import MOST_SHORT_LIVES

CONFIG = AdaccConfig(min_compress_bytes=0)


class Shared:
    scale = 1.0


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        return self.layer(hidden).sigmoid()


def by(number):
    """Return a function with a number in its closure."""
    return lambda hidden: hidden * number


class Values:
    """A number for a block to read, in places of different kinds. torch_glue/test_dynamo.py has more places."""

    def __init__(self):
        self.attribute, self.numpy, self.elements, self.shared = 1.0, np.float64(1.0), [1.0], Shared()
        self.cut, self.closure, self.active = slice(0, 6), by(1.0), ["first"]


PUT = {
    "attribute": lambda values, value: setattr(values, "attribute", value),
    "numpy": lambda values, value: setattr(values, "numpy", np.float64(value)),
    "type of numpy": lambda values, value: setattr(values, "numpy", np.float32(value)),
    "element": lambda values, value: values.elements.__setitem__(0, value),
    "class attribute": lambda values, value: setattr(Shared, "scale", value),
    "slice": lambda values, value: setattr(values, "cut", slice(0, 3 + int(value))),
    "closure": lambda values, value: setattr(values, "closure", by(value)),
    "adapter": lambda values, value: values.active.__setitem__(0, "second" if value > 1 else "first"),
}
"""Functions that change the number at a place."""
PLACES = (*PUT, "dropout", "mode", "frozen")


def forward(block, hidden):
    values = block.values
    scale = values.attribute * values.elements[0] * values.shared.scale
    x = values.closure((block.up(hidden) * scale).tanh() * values.numpy)
    x = (x * 0.1).exp()
    part = block.adapters[values.active[0]](x)[:, values.cut]
    return hidden + block.dropout(block.down(x)) + part.sum(1, keepdim=True)


def setup(block):
    block.values, block.dropout = Values(), nn.Dropout(0.1)
    block.adapters = nn.ModuleDict({"first": Adapter(), "second": Adapter()})


def put(model, place, value):
    """Change one number of the second block, or of both blocks where they share it."""
    block = model.layers[1]
    if place == "dropout":
        block.dropout.p = value / 10
    elif place == "mode":
        block.dropout.train(value <= 2)
    elif place == "frozen":
        block.up.bias.requires_grad_(value <= 2)
    else:
        PUT[place](block.values, value)


def start(model):
    for place in PLACES:
        put(model, place, 1.0)


def train(model, batch, changes):
    """Return the results of `run_steps` per step. Step i begins with `changes[i]`."""
    start(model)
    results = []
    for seed, change in enumerate(changes):
        if change is not None:
            put(model, *change)
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | gradients)
        model.zero_grad(set_to_none=True)
    return results


@pytest.fixture(scope="module")
def toy(toy_model):
    """A model for all examples: it is traced once for each path."""
    return toy_model(forward, setup=setup)


@pytest.fixture(scope="module")
def profile(toy, toy_batch):
    start(toy)
    return profile_model(toy, toy_batch(), CONFIG)


@pytest.mark.parametrize("place", PLACES)
def test_a_changed_number_is_never_replayed_with_the_old_one(toy, toy_batch, profile, assert_same_steps, place):
    """A number that changes and changes back is never replayed with its old value, at calls without validation too."""
    batch = toy_batch()
    changes = [None, None, None, (place, 3.0), (place, 1.0), None, (place, 3.0), None, (place, 0.5), (place, 3.0)]
    plain = train(toy, batch, changes)
    start(toy)
    with apply_policy(toy, uniform_policy(profile, "recompute")):
        assert_same_steps(train(toy, batch, changes), plain)


def test_an_array_that_changes_in_place_is_never_replayed_as_it_was(toy_model, toy_batch, run_steps, assert_same_steps):
    """An array that changes in place is never replayed with old elements, although Dynamo does not guard elements."""
    array = np.linspace(0.5, 1.5, 8, dtype=np.float32)

    def forward(block, hidden):
        scaled = block.up(hidden) * torch.from_numpy(array).clone()
        return hidden + block.down((scaled * float(array[3])).tanh().exp())

    model, batch = toy_model(forward), toy_batch()
    plain = {}
    for array[3] in (1.0, 2.0, 3.0):
        plain[float(array[3])] = run_steps(model, batch, num_steps=1)
    with recompute_all(model, batch, CONFIG):
        for array[3] in (3.0, 3.0, 3.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0, 3.0):
            assert_same_steps(run_steps(model, batch, num_steps=1), plain[float(array[3])])


def test_a_value_is_recorded_once_for_all_policies(toy, toy_batch, profile, recorded_blocks):
    batch = toy_batch()
    policy = uniform_policy(profile, "recompute")
    start(toy)
    there_and_back = [None, None, ("attribute", 2.0), None, ("attribute", 1.0), None, ("attribute", 2.0)]
    recorded_blocks.clear()
    with apply_policy(toy, policy) as handle:
        train(toy, batch, there_and_back)
        first = recorded_blocks.count("layers.1")
        handle.replace(policy)
        train(toy, batch, there_and_back)
    # Two calls of each value, as of each shape, are recorded or checked: the first and the second.
    assert first == 2 * 2
    assert recorded_blocks.count("layers.1") == first


def counting(block, hidden):
    block.num_calls += 1
    return hidden + block.down((block.up(hidden) * 1.5).tanh().exp())


def test_a_count_of_calls_that_nothing_follows_from_costs_nothing(
    toy_model, toy_batch, run_steps, assert_same_steps, recorded_blocks
):
    """A call counter that affects no operator causes no recording."""
    toy, batch = toy_model(counting, setup=lambda block: setattr(block, "num_calls", 0)), toy_batch()
    plain = run_steps(toy, batch, num_steps=MOST_SHORT_LIVES + 12)
    with recompute_all(toy, batch, CONFIG) as handle:
        assert_same_steps(run_steps(toy, batch, num_steps=MOST_SHORT_LIVES + 12), plain)
        strategy = handle.plans.strategies["layers.0"]
        assert strategy.known_shapes.paths.untraced is None
        assert not handle.tape_cache.fallbacks.counts


def count_as_factor(block, hidden):
    block.num_calls += 1
    return hidden + block.down((block.up(hidden) * block.num_calls).tanh().exp())


def test_a_count_that_the_operators_follow_from_leaves_the_block_to_torchs_checkpoint(
    toy_model, toy_batch, assert_same_steps, run_steps, caplog
):
    model, batch = toy_model(count_as_factor, setup=lambda block: setattr(block, "num_calls", 0)), toy_batch()
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")

    def steps():
        for block in model.layers:
            block.num_calls = 0
        return run_steps(model, batch, num_steps=MOST_SHORT_LIVES + 12)

    plain = steps()
    with apply_policy(model, policy) as handle, caplog.at_level(logging.WARNING):
        ours = steps()
        assert handle.tape_cache.fallbacks.counts[VARYING] > 0
    first = [step for step, (one, other) in enumerate(zip(ours, plain, strict=True)) if not same(one, other)]
    # torch's checkpoint runs the block again in backward, and so counts twice, as plain checkpointing does.
    assert not first or first[0] > MOST_SHORT_LIVES
    assert "num_calls" in caplog.text
    assert "changes again and again" in caplog.text


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)
