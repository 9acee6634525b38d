"""A row-wise module in tiles: results, gradients, and calls that run whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adacc_hf.artifacts.errors import TilesError
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.tiled_rows import GradientSums, run_in_tiles, watching_tiles


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 5))

    def forward(self, rows):
        return self.part(rows)


def tiled(block, number, *args, backward_only=False):
    tiling = Tiling(modules=("part",), backward_only=("part",) if backward_only else (), num_tiles=number)
    return run_in_tiles(block, tiling, block, *args)


@settings(deadline=None, max_examples=30)
@given(
    number=st.integers(2, 30),
    shape=st.sampled_from([(7, 6), (2, 9, 6), (2, 3, 4, 6), (1, 1, 6)]),
    needs=st.booleans(),
    backward_only=st.booleans(),
)
def test_results_and_gradients_are_those_of_the_whole_module(number, shape, needs, backward_only):
    torch.manual_seed(0)
    block, rows = Block().double(), torch.randn(shape, dtype=torch.float64, requires_grad=needs)
    results = [block(rows), tiled(block, number, rows, backward_only=backward_only)]
    weights = torch.randn_like(results[0])
    wanted = [*block.parameters(), *([rows] if needs else [])]
    expected, gradients = (torch.autograd.grad((result * weights).sum(), wanted) for result in results)
    assert torch.allclose(*results)
    assert all(map(torch.allclose, expected, gradients))


@pytest.mark.parametrize("backward_only", [False, True])
@pytest.mark.parametrize("wrong", [lambda rows: (rows,), lambda rows: rows.sum(), lambda rows: rows[:, :1]])
def test_a_module_without_a_result_for_each_row_is_refused(wrong, backward_only):
    block = Block()
    block.part = nn.Sequential(nn.Linear(6, 6))
    block.part.forward = lambda rows: wrong(nn.functional.relu(rows))
    with pytest.raises(TilesError, match='leave "tile" out'):
        tiled(block, 2, torch.randn(2, 4, 6, requires_grad=True), backward_only=backward_only)


def test_a_forward_on_all_rows_must_not_draw_random_numbers():
    block = Block()
    block.part.append(nn.Dropout(0.5))
    with pytest.raises(TilesError, match="draws random numbers"):
        tiled(block, 2, torch.randn(4, 6, requires_grad=True), backward_only=True)


def test_only_the_backward_of_a_forward_on_all_rows_is_watched():
    moments = []
    with watching_tiles(lambda moment, module: moments.append((moment, module))):
        result = tiled(Block(), 2, torch.randn(4, 6, requires_grad=True), backward_only=True)
    assert not moments
    result.sum().backward()
    assert moments == [("begin", 0), ("end", 0)]


def test_runs_over_tiles_are_watched_in_forward_and_backward():
    moments = []
    block, rows = Block(), torch.randn(4, 6, requires_grad=True)
    with watching_tiles(lambda moment, module: moments.append((moment, module))):
        result = tiled(block, 2, rows)
    assert moments == [("begin", 0), ("end", 0)]
    result.sum().backward()
    assert moments == [("begin", 0), ("end", 0)] * 2
    tiled(block, 2, rows)
    assert len(moments) == 4


def test_sums_over_tiles_are_in_float32():
    parameter = torch.zeros(1, dtype=torch.bfloat16)
    sums = GradientSums((parameter, parameter))
    for _ in range(512):
        sums.add((torch.ones_like(parameter), None))
    total, unused = sums.gradients()
    assert total.dtype is torch.bfloat16
    assert total.item() == 512, "in bfloat16 the sum would stop at 256"
    assert unused is None
