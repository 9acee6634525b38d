"""Keys of a block's calls: calls that run the same operators, calls that no guard covers, layouts of tensors."""

from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adacc_hf.tape import guards
from adacc_hf.tape.guards import MOST_SHORT_LIVES, BlockPaths, KnownShapes


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


# Layouts of tensors


class Adding(nn.Module):
    """A block that adds its arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, *args, **kwargs):
        return sum(args) + sum(kwargs.values())


BLOCK = Adding()


def key_of(known_shapes, *args, block=BLOCK, **kwargs):
    return known_shapes.key(block, partial(block, **kwargs), args, kwargs)


def test_how_arguments_lie_tells_calls_apart():
    known_shapes, rows = KnownShapes(), torch.ones(4, 6)
    calls = [(rows,), (rows.t().contiguous().t(),), (torch.ones(5, 6)[1:],), (torch.ones(4, 6, requires_grad=True),)]
    calls += [(rows, rows), (rows, torch.ones(4, 6))]
    keys = [key_of(known_shapes, *args) for args in calls]
    assert len(set(keys)) == len(keys)
    assert key_of(known_shapes, torch.ones(4, 6)) == keys[0]


def flatten(block):
    """Put the parameters into one storage, as DeepSpeed does."""
    parameters = list(block.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)


@pytest.fixture
def block():
    block = Adding()
    block.tables = [torch.ones(4)]
    block.register_buffer("table", torch.ones(4))
    return block


MOVES = {
    "flatten": flatten,
    "shift": lambda block: setattr(block.layer.weight, "data", torch.ones(5, 2)[3:]),
    "transpose": lambda block: setattr(block.layer.weight, "data", block.layer.weight.data.t()),
    "tie": lambda block: setattr(block.layer.bias, "data", block.layer.weight.data[0]),
    "grow": lambda block: block.tables.append(torch.ones(3)),
    "grow in place": lambda block: block.tables.__setitem__(0, torch.ones(9)),
    "grow a buffer": lambda block: setattr(block, "table", torch.ones(9)),
    "retype": lambda block: setattr(block, "table", torch.ones(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_tensors_that_lie_elsewhere_are_another_layout(block, move):
    known_shapes = KnownShapes()
    key = key_of(known_shapes, torch.ones(2), block=block)
    first = known_shapes.with_current_layout(key, block)
    move(block)
    second = known_shapes.with_current_layout(first, block)
    assert second == first._replace(layout=second.layout) != first
    assert key_of(known_shapes, torch.ones(2), block=block).layout == second.layout  # from now on
    assert known_shapes.with_current_layout(second, block) == second


def test_other_tensors_that_lie_alike_are_no_other_layout(block):
    known_shapes = KnownShapes()
    key = known_shapes.with_current_layout(key_of(known_shapes, torch.ones(2), block=block), block)
    block.layer.weight = nn.Parameter(torch.zeros(2, 2))
    block.layer.bias.data = torch.zeros(2)
    block.tables, block.table = [torch.zeros(4)], torch.zeros(4)
    assert known_shapes.with_current_layout(key, block) == key


def test_blocks_of_one_kind_have_keys_in_common(block):
    one, other, third = block, Adding(), Adding()
    for each in (other, third):
        each.tables, each.table = [torch.ones(9)], nn.Buffer(torch.ones(4))
    known_shapes = [KnownShapes() for _ in range(3)]
    keys = [key_of(k, torch.ones(2), block=b) for k, b in zip(known_shapes, (one, other, third), strict=True)]
    assert keys[0] != keys[1] == keys[2]
    one.tables = [torch.ones(9)]
    assert known_shapes[0].with_current_layout(keys[0], one) == keys[1]
