"""Sizes of the groups into which codecs divide a tensor, and dense tensors."""

from functools import lru_cache
from math import prod

import torch


@lru_cache(maxsize=4096)
def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if a tensor of this size and stride fills its range of memory without gap or overlap."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


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
