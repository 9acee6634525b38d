"""Triton kernels of bitmask: one launch to pack, one to unpack."""

import torch
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


def encode(patterns_N: Tensor, with_pattern: bool) -> tuple[Tensor, ...]:
    """Pack one bit per element on a GPU, 1 for a nonzero element. Return uint8 [ceil(N / 8)], as `bitmask.encode_ref`
    does. If `with_pattern`, also return the bit pattern of the nonzero elements, which are all equal, as a tensor of
    shape [1]. If all elements are 0, the pattern is unspecified."""
    numel = patterns_N.shape[0]
    packed = patterns_N.new_empty(cdiv(numel, 8), dtype=torch.uint8)
    pattern = patterns_N.new_empty(1) if with_pattern else None
    grid = (cdiv(packed.shape[0], TILE_ELEMENTS),)
    launch(_encode_kernel, grid, patterns_N, packed, pattern, numel, packed.shape[0], BLOCK=TILE_ELEMENTS)
    return (packed,) if pattern is None else (packed, pattern)


def decode(out_N: Tensor, packed: Tensor, pattern: Tensor | None = None) -> None:
    """Decode the results of `encode` (bitmask) into `out_N`, a contiguous tensor of integers on a GPU."""
    grid = (cdiv(packed.shape[0], TILE_ELEMENTS),)
    launch(_decode_kernel, grid, out_N, packed, pattern, out_N.shape[0], packed.shape[0], BLOCK=TILE_ELEMENTS)
