"""Python values that blocks read, changed during training: each value has its own tapes (rules R1 and R8)."""

import numpy as np
import pytest
import torch
from recomputed_models import recompute_all

from adacc_hf import AdaccConfig
from adacc_hf.tape.guards import MOST_SHORT_LIVES

CONFIG = AdaccConfig(min_compress_bytes=0)


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


def scaled(block, hidden):
    return hidden + block.down((block.up(hidden) * block.scale).tanh().exp())


def counting(block, hidden):
    block.num_calls += 1
    return hidden + block.down((block.up(hidden) * 1.5).tanh().exp())


def count_as_factor(block, hidden):
    block.num_calls += 1
    return hidden + block.down((block.up(hidden) * block.num_calls).tanh().exp())


@pytest.mark.parametrize("forward", [counting, count_as_factor])
def test_a_count_of_calls_is_followed(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    model, batch = toy_model(forward, setup=lambda block: setattr(block, "num_calls", 0)), toy_batch()

    def steps():
        for block in model.layers:
            block.num_calls = 0
        return run_steps(model, batch, num_steps=MOST_SHORT_LIVES + 12)

    plain = steps()
    with recompute_all(model, batch, CONFIG) as handle:
        assert_same_steps(steps(), plain)
        assert handle.plans.strategies["layers.0"].known_shapes.paths.untraced is None
        assert not handle.tape_cache.fallbacks
