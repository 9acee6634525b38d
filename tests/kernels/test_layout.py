"""Strides: layouts that are read without a copy, and the layout of the result."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adacc_hf.kernels._layout import as_flat, is_overlapping, memory_positions, restore, rows_and_columns
from adacc_hf.kernels.codecs import Payload


def _numbered() -> Tensor:
    return torch.arange(2.0 * 3 * 70 * 4).view(2, 3, 70, 4)


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_restore_undoes_as_flat(layout: Callable[[Tensor], Tensor], keep_rows: bool) -> None:
    x = layout(_numbered())
    flat = as_flat(x, keep_rows)
    payload = Payload((flat,), x.dtype, tuple(x.shape), x.stride())
    restored = restore(lambda out: out.copy_(flat.view(out.shape)), payload, keep_rows)
    assert restored.stride() == x.stride()
    assert torch.equal(restored, x)


def test_only_what_overlaps_is_written_by_position(layout: Callable[[Tensor], Tensor]) -> None:
    """Positions take 8 bytes per element, several times the bytes of the codes."""
    x = layout(_numbered())
    size, stride = tuple(x.shape), x.stride()
    shared = memory_positions(size, stride, x.device).unique().numel() < x.numel()
    assert is_overlapping(size, stride) == shared


@pytest.mark.parametrize(
    ("name", "view", "copies_flat", "copies_rows"),
    [
        ("contiguous", lambda x: x, False, False),
        ("heads", lambda x: x.transpose(1, 2), False, False),
        ("last", lambda x: x.transpose(2, 3), False, True),
        ("gaps", lambda x: x[..., 1:3], True, True),
        ("expanded", lambda x: x[:1].expand(5, 3, 70, 4), True, True),
    ],
)
def test_dense_views_are_not_copied(name, view, copies_flat, copies_rows):
    x = view(_numbered())
    for keep_rows, copies in ((False, copies_flat), (True, copies_rows)):
        shared = as_flat(x, keep_rows).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert shared is not copies


def test_rows_stay_whole_where_they_must() -> None:
    x = _numbered().transpose(2, 3)
    rows = as_flat(x, keep_rows=True).view(rows_and_columns(tuple(x.shape)))
    assert torch.equal(rows[0], x[0, 0, 0])
