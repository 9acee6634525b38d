"""Tensors that fill their range of memory."""

import pytest
import torch

from adacc_hf.kernels._layout import is_dense

NUMBERS = torch.arange(2.0 * 3 * 70 * 4).view(2, 3, 70, 4)
LAYOUTS = {
    "contiguous": (NUMBERS, True),
    "transposed heads": (NUMBERS.transpose(1, 2), True),
    "transposed last": (NUMBERS.transpose(2, 3), True),
    "sliced columns": (NUMBERS[..., 1:3], False),
    "sliced rows": (NUMBERS[:, :, 5:66:2], False),
    "expanded": (NUMBERS[:1].expand(5, 3, 70, 4), False),
    "overlapping": (NUMBERS.view(-1).unfold(0, 6, 2), False),
    "one element": (NUMBERS[:1, :1, :1, :1], True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gaps_and_overlaps_are_not_dense(name):
    tensor, is_expected = LAYOUTS[name]
    assert is_dense(tuple(tensor.shape), tensor.stride()) == is_expected
