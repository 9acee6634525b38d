"""Triton kernels of bitmask: one launch to pack, one to unpack."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._triton import TILE_ELEMENTS, cdiv, launch


@triton.jit
def _encode_kernel(
    x_ptr,  # integers [numel]
    packed_ptr,  # uint8 [num_bytes]
    pattern_ptr,  # like x [1], or None
    numel,
    num_bytes,
    BLOCK: tl.constexpr,
):
    """Pack one bit per element into BLOCK bytes, and store the bit pattern that all nonzero elements share."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    local = tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    any_set = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for j in tl.static_range(8):
        start = first + j * tl.full([], num_bytes, tl.int64)
        is_valid = (local < num_bytes - first) & (local < numel - start)
        x = tl.load(x_ptr + start + local, mask=is_valid, other=0)
        packed |= (x != 0).to(tl.int32) << j
        any_set |= x
    tl.store(packed_ptr + first + local, packed.to(tl.uint8), mask=local < num_bytes - first)
    if pattern_ptr is not None:
        # Set elements have one pattern c. The maximum and the minimum are each 0 or c, and all programs write c.
        pattern = (tl.max(any_set, axis=0) | tl.min(any_set, axis=0)).to(x_ptr.dtype.element_ty)
        tl.store(pattern_ptr, pattern, mask=pattern != 0)


@triton.jit
def _decode_kernel(
    out_ptr,  # integers [numel]
    packed_ptr,  # uint8 [num_bytes]
    pattern_ptr,  # like out [1], or None
    numel,
    num_bytes,
    BLOCK: tl.constexpr,
):
    """Unpack BLOCK bytes, and store one element per bit: 0 if the bit is 0, otherwise the pattern, which is 1 if
    `pattern_ptr` is None."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    local = tl.arange(0, BLOCK)
    packed = tl.load(packed_ptr + first + local, mask=local < num_bytes - first, other=0).to(tl.int32)
    pattern = tl.full([1], 1, out_ptr.dtype.element_ty)
    if pattern_ptr is not None:
        pattern = tl.load(pattern_ptr + tl.arange(0, 1))
    for j in tl.static_range(8):
        start = first + j * tl.full([], num_bytes, tl.int64)
        is_valid = (local < num_bytes - first) & (local < numel - start)
        x = tl.where(((packed >> j) & 1) != 0, pattern, tl.zeros_like(pattern))
        tl.store(out_ptr + start + local, x, mask=is_valid)


def encode(patterns_N: Tensor, packed: Tensor, pattern: Tensor | None = None) -> None:
    """Pack one bit per element on a GPU, 1 for a nonzero element, into uint8 [ceil(N / 8)]. If `pattern` [1] is passed,
    also store the bit pattern of the nonzero elements, which are all equal. If all elements are 0, it is
    unspecified."""
    _launch(_encode_kernel, patterns_N, packed, pattern)


def decode(out_N: Tensor, packed: Tensor, pattern: Tensor | None = None) -> None:
    """Decode the results of `encode` (bitmask) into `out_N`, a contiguous tensor of integers on a GPU."""
    _launch(_decode_kernel, out_N, packed, pattern)


def _launch(kernel: Any, patterns_N: Tensor, packed: Tensor, pattern: Tensor | None) -> None:
    grid = (cdiv(packed.shape[0], TILE_ELEMENTS),)
    launch(kernel, grid, patterns_N, packed, pattern, patterns_N.shape[0], packed.shape[0], BLOCK=TILE_ELEMENTS)
