"""Traced paths: calls of a block that run the same operators, and calls that no guard covers."""

from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adacc_hf.tape import guards
from adacc_hf.tape.guards import MOST_SHORT_LIVES, BlockPaths


@pytest.fixture
def block_class():
    """`block_class(code)`: a new class of blocks that run `code(block, hidden, *args)`."""

    def make(code):
        class Block(nn.Module):
            def __init__(self, **attributes):
                super().__init__()
                self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)
                vars(self).update(attributes)

            def forward(self, hidden, *args, **kwargs):
                return code(self, hidden, *args, **kwargs)

        return Block

    return make


@pytest.fixture
def traces(monkeypatch):
    """List of the scopes that were traced, one for each trace."""
    scopes = []
    trace = guards.trace
    monkeypatch.setattr(guards, "trace", lambda scope, *a, **k: scopes.append(scope) or trace(scope, *a, **k))
    return scopes


def scaled(block, hidden):
    return block.layer(hidden) * block.scale


def text(samples=2, tokens=6):
    return torch.ones(samples, tokens, 8)


class Calls:
    """Keys of the calls of one block."""

    def __init__(self, block, untraceable=None):
        self.block = block
        self.paths = BlockPaths(untraceable)

    def key(self, *args, **kwargs):
        return self.paths.key(self.block, partial(self.block, **kwargs), args or (text(),))


# Traced paths


def test_other_values_are_other_paths_and_are_known_again(block_class, traces):
    calls = Calls(block_class(scaled)(scale=1.0))
    keys = []
    for calls.block.scale in (1.0, 2.0, 1.0, 2.0, 3.0, 1.0):
        keys.append(calls.key())
    assert len(traces) == 3
    assert keys[0] == keys[2] == keys[5]
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


def test_blocks_of_a_class_share_their_paths(block_class, traces):
    """Blocks of one class share their paths, in one model or several, while the guards hold."""
    make = block_class(scaled)
    blocks = [make(scale=scale) for scale in (1.0, 1.0, 2.0, 1.0)]
    first, second, other, _ = keys = [Calls(block).key() for block in blocks]
    assert first == second == keys[3] != other
    assert len(traces) == 2


def test_the_least_recently_used_path_goes(block_class, traces, monkeypatch):
    monkeypatch.setattr(guards, "MAX_PATHS", 3)
    calls = Calls(block_class(scaled)(scale=0.0))
    keys = {}
    for calls.block.scale in (0.0, 1.0, 2.0):
        keys[calls.block.scale] = calls.key()
    calls.block.scale = 0.0
    assert calls.key() == keys[0.0]
    calls.block.scale = 3.0
    calls.key()  # replaces the path of 1.0
    assert len(traces) == 4
    for calls.block.scale in (0.0, 2.0):
        assert calls.key() == keys[calls.block.scale]
    assert len(traces) == 4
    calls.block.scale = 1.0
    assert calls.key() != keys[1.0]  # no caller may mistake it for the old path
    assert len(traces) == 5


def test_a_path_that_compares_an_address_of_what_died_fits_no_more(block_class, traces):
    code = lambda block, hidden: block.layer(hidden) * (2.0 if isinstance(block.scale, block.kind) else 3.0)  # noqa: E731
    calls = Calls(block_class(code)(scale=1.0, kind=type("Kind", (), {})))
    before = calls.key()
    del calls.block.kind
    calls.block.kind = float
    assert calls.key() != before
    assert len(traces) == 2


# Numbers without a guard


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(np.float64(1.0), np.float64(2.0), id="value"),
        pytest.param(np.float64(1.0), np.float64(1.0 + 2**-52), id="last bit"),
        pytest.param(np.float64(0.0), np.float64(-0.0), id="sign of zero"),
        pytest.param(np.float32(1.0), np.float64(1.0), id="type"),
        pytest.param(np.int64(1), np.int64(2), id="whole number"),
        pytest.param(np.float64(2.0), 2.0, id="a float"),
    ],
)
def test_numbers_of_numpy_are_part_of_the_key(block_class, one, other):
    calls = Calls(block_class(scaled)(scale=one))
    before = calls.key()
    assert calls.key() == before
    hash(before)
    calls.block.scale = other
    assert calls.key() != before
    calls.block.scale = one.copy()
    assert calls.key() == before
    assert calls.paths.untraced is None


def test_what_transformers_only_passes_through_is_no_part(block_class, traces):
    """Arguments that Transformers only passes through are no part of the key."""
    calls = Calls(block_class(lambda block, hidden, **kwargs: block.layer(hidden))())
    keys = {calls.key(text(), num_items_in_batch=torch.tensor(number)) for number in range(3)}
    keys |= {calls.key(text(), num_items_in_batch=number) for number in range(5, 5 + 3)}
    assert len(keys) <= 2
    assert len(traces) <= 2


# Blocks that cannot be traced whole


def test_a_block_that_cannot_be_traced_is_tried_once(block_class, traces):
    block, untraceable = block_class(lambda block, hidden: hidden if hidden.sum() > 0 else -hidden)(), OrderedDict()
    calls = Calls(block, untraceable)
    assert calls.key() is calls.key(text(3, 7)) is None
    assert "branching" in calls.paths.untraced
    assert list(untraceable.values()) == [calls.paths.untraced]
    assert len(traces) == 1  # no second attempt, nor one for other blocks of its class in the model
    other = Calls(type(block)(), untraceable)
    assert other.key() is None
    assert other.paths.untraced == calls.paths.untraced
    assert len(traces) == 1


def test_a_block_that_is_another_one_at_every_call_is_traced_no_more(block_class, traces):
    calls = Calls(block_class(scaled)(scale=0))
    for calls.block.scale in map(float, range(2 * MOST_SHORT_LIVES)):
        calls.key()
    assert len(traces) == MOST_SHORT_LIVES
    assert "scale" in calls.paths.untraced
    assert "changes again and again" in calls.paths.untraced


def test_a_block_that_is_traced_no_more_is_vouched_for_where_a_path_is_known_alone(block_class, traces):
    calls = Calls(block_class(scaled)(scale=0))
    for calls.block.scale in map(float, range(2 * MOST_SHORT_LIVES)):
        calls.key()
    for calls.block.scale in (0.0, 77.0, 1.0, 78.0, 78.0, 0.0, 1.0):
        calls.key()
        assert (calls.paths.untraced is None) == (calls.block.scale < MOST_SHORT_LIVES)
    assert len(traces) == MOST_SHORT_LIVES


def test_tensors_without_memory_are_not_traced(block_class, traces):
    """Meta and fake tensors are not traced, because an estimate needs shapes only."""
    with FakeTensorMode():
        block = block_class(scaled)(scale=1.0)
        calls = Calls(block)
        assert calls.key() == calls.key()
    assert traces == []
    assert calls.paths.untraced is None
