"""Conversion of tensors with any strides to flat memory, and back.

A dense tensor (a permutation of a contiguous tensor) is read and written in memory order without a copy. Any other
tensor (a slice with gaps, an expanded or overlapping view) is copied to contiguous memory before it is encoded.
Decoding restores the tensor's strides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adacc_hf.kernels.codecs import Payload


@lru_cache(maxsize=4096)
def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if a tensor of this size and stride fills its range of memory without gap or overlap."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


@lru_cache(maxsize=4096)
def has_dense_rows(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if a tensor of this size and stride is dense, and its last dimension is the innermost in memory."""
    return is_dense(size, stride) and (not size or size[-1] == 1 or stride[-1] == 1)


@lru_cache(maxsize=4096)
def is_overlapping(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if elements of a tensor of this size and stride may share memory. Elements may share memory if a
    dimension's stride is smaller than the range of memory that the dimensions with smaller strides cover."""
    reach = 0
    for step, length in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step <= reach:
            return True
        reach += step * (length - 1)
    return False


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers (R, C) of rows and columns of a tensor that is treated as a matrix. C is the last dimension,
    and R the product of all other dimensions. A scalar is (1, 1)."""
    columns = shape[-1] if shape else 1
    return prod(shape[:-1]), columns


def even_groups(count: int, group_size: int) -> int:
    """Return the number of groups that `count` elements fill, rounded up to an even number."""
    return -(-count // (2 * group_size)) * 2


def peak_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the 16-bit dtype in which codecs store the peaks of a tensor of this dtype. The peak of a group of
    elements is the element with the largest absolute value."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def as_flat(tensor: Tensor, keep_rows: bool = False) -> Tensor:
    """Return the tensor's elements as a contiguous tensor [N]: a view in memory order if possible, else a copy. If
    `keep_rows`, elements of a row (the last dimension) stay together, for row-wise and channel-wise codecs."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    layout = (tuple(tensor.shape), tensor.stride())
    if has_dense_rows(*layout) if keep_rows else is_dense(*layout):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the tensor as a contiguous matrix [R, C], whose rows run along the last dimension: a view if possible,
    else a copy. The rows are in the order of `as_flat` with `keep_rows`."""
    shape = rows_and_columns(tensor.shape)
    return tensor.view(shape) if tensor.is_contiguous() else as_flat(tensor, keep_rows=True).view(shape)


def restore(fill: Callable[[Tensor], None], payload: Payload, keep_rows: bool = False) -> Tensor:
    """Return a new tensor with the dtype, size and stride that the original tensor had before it was encoded.
    `fill(out)` must write the elements. `out` is contiguous: [N] in the order of `as_flat`, or, if `keep_rows`, [R, C]
    in the order of `as_matrix`."""
    size, stride, dtype, device = payload.size, payload.stride, payload.dtype, payload.tensors[0].device
    out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    shape = rows_and_columns(size) if keep_rows else (prod(size),)
    if has_dense_rows(size, stride) if keep_rows else is_dense(size, stride):
        fill(out.as_strided(shape, (*shape[1:], 1)))
        return out
    contiguous = torch.empty(shape, dtype=dtype, device=device)
    fill(contiguous)
    if not is_overlapping(size, stride):
        return out.copy_(contiguous.view(size))
    positions = memory_positions(size, stride, device)
    # Overlapping elements were equal before encoding, so the order of writes does not matter.
    span = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,))
    span.index_put_((positions,), contiguous.view(-1))
    return out


def memory_positions(size: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the memory offset of each element, counted in elements, as int64 [N]. The elements are in row-major
    order."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for length, step in zip(size, stride, strict=True):
        positions = positions[..., None] + torch.arange(length, device=device) * step
    return positions.reshape(-1)
