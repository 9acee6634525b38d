"""Known shapes: the keys of a block's calls."""

from functools import partial

import pytest
import torch
from torch import nn

from adacc_hf.tape.call_key import KnownShapes


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


# Layout of the tensors attached to a block


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
