"""The measured memory of one tile predicts the memory of tiles of other sizes."""

import pytest
import torch
from torch import nn

from adacc_hf.artifacts.tiles import ModuleTiles, tile_rows
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.tile_memory import measure_tile


@pytest.fixture
def part(one_thread):
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def test_lines_predict_other_sizes(part):
    few, many = (measure_tile(part, torch.randn(1, rows, 16), Measurement()) for rows in (24, 96))
    tiles = [
        ModuleTiles(
            module="", operators=(0,), num_operators=3, num_rows=96, forward=memory.forward, backward=memory.backward
        )
        for memory in (few, many)
    ]
    for number in (2, 3, 8):
        assert tiles[0].forward_bytes(number) == tiles[1].forward_bytes(number)
        assert tiles[0].backward_bytes(number) == tiles[1].backward_bytes(number)
    assert tiles[0].forward_bytes(2) == tile_rows(96, 2) * 4 * (64 + 64), "the layer's result, and GELU's"


def test_a_module_with_other_operators_at_other_sizes_is_not_measured(part):
    class Part(nn.Sequential):
        def forward(self, rows):
            return super().forward(rows if rows.shape[1] > 8 else rows * 2)

    assert measure_tile(Part(*part), torch.randn(1, 24, 16), Measurement()) is None
    assert measure_tile(part, torch.randn(1, 1, 16), Measurement()) is None, "a single row has no tiles"


def test_the_measurement_leaves_no_gradient(part):
    measure_tile(part, torch.randn(2, 8, 16), Measurement())
    assert all(parameter.grad is None for parameter in part.parameters())
