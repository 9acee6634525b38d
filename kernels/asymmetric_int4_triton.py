"""Triton kernels of asymmetric_int4: one launch to encode, one to decode."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._triton import (
    cdiv,
    codes_up_to,
    groups_per_program,
    inverse_of,
    jit,
    launch,
    rounded_to,
    upper_half,
    widened,
)
from adacc_hf.kernels.asymmetric_int4 import FACTOR


@triton.jit
def _least(a, b):
    """Return the smaller of two numbers in a Triton kernel, or NaN if either is NaN. `tl.min` would ignore NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _greatest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _encode_half(
    x_ptr,
    offsets_ptr,
    half_ranges_ptr,
    first_group,
    groups_left,
    numel,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups, starting with first_group. Store their offsets and their (max - min) / 2, and return int32 codes
    [T, G]. Each byte packs the codes of two groups: one from the first half of the tensor's elements, and one from the
    second half. The caller therefore calls this function twice."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    last = tl.load(x_ptr + numel - 1)
    x = widened(tl.load(x_ptr + first + local, mask=local < numel - first, other=last))
    low = tl.reduce(x, 1, _least)
    high = tl.reduce(x, 1, _greatest)
    stored_half_range = upper_half((high * 0.5 - low * 0.5).to(tl.uint32, bitcast=True))
    half_range = widened(stored_half_range)
    tl.store(half_ranges_ptr + first_group + group, stored_half_range, mask=group < groups_left)
    tl.store(offsets_ptr + first_group + group, rounded_to(low, x_ptr.dtype.element_ty), mask=group < groups_left)
    steps = (x * 0.5 - (low * 0.5)[:, None]) * inverse_of(half_range, factor)[:, None]
    return codes_up_to(steps + 0.5, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    offsets_ptr,  # [2 * rows], of x's dtype
    half_ranges_ptr,  # bfloat16 [2 * rows]
    numel,
    rows,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups of each half of the tensor, and pack their codes two per byte."""
    first_row = tl.program_id(0) * T
    groups_left = rows - first_row
    low = _encode_half(x_ptr, offsets_ptr, half_ranges_ptr, first_row, groups_left, numel, factor, T, G)
    high = _encode_half(x_ptr, offsets_ptr, half_ranges_ptr, first_row + rows, groups_left, numel, factor, T, G)
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    codes = (low | (high << 4)).to(tl.uint8)
    tl.store(codes_ptr + first_row.to(tl.int64) * G + local, codes, mask=group < groups_left)


@triton.jit
def _decode_half(
    out_ptr,
    codes,
    offsets_ptr,
    half_ranges_ptr,
    first_group,
    groups_left,
    numel,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Decode T groups from their unpacked int32 codes [T, G], and store the elements."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    half_range = widened(tl.load(half_ranges_ptr + first_group + group, mask=group < groups_left, other=0.0))
    offset = widened(tl.load(offsets_ptr + first_group + group, mask=group < groups_left, other=0.0))
    x = (codes.to(tl.float32) * (half_range * factor)[:, None] + (offset * 0.5)[:, None]) * 2.0
    is_valid = (group[:, None] < groups_left) & (local < numel - first)
    tl.store(out_ptr + first + local, rounded_to(x, out_ptr.dtype.element_ty), mask=is_valid)


@jit
def _decode_kernel(
    out_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    offsets_ptr,  # [2 * rows], of out's dtype
    half_ranges_ptr,  # bfloat16 [2 * rows]
    numel,
    rows,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Decode T groups of each half of the tensor from codes packed two per byte."""
    first_row = tl.program_id(0) * T
    groups_left = rows - first_row
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    packed = tl.load(codes_ptr + first_row.to(tl.int64) * G + local, mask=group < groups_left, other=0).to(tl.int32)
    _decode_half(out_ptr, packed & 15, offsets_ptr, half_ranges_ptr, first_row, groups_left, numel, factor, T, G)
    _decode_half(out_ptr, packed >> 4, offsets_ptr, half_ranges_ptr, first_row + rows, groups_left, numel, factor, T, G)


def encode(flat_N: Tensor, codes: Tensor, offsets: Tensor, half_ranges: Tensor) -> None:
    """Encode a contiguous tensor on a GPU, as `AsymmetricInt4.encode_traceable` does."""
    _launch(_encode_kernel, flat_N, codes, offsets, half_ranges)


def decode(out_N: Tensor, codes: Tensor, offsets: Tensor, half_ranges: Tensor) -> None:
    """Decode the results of `encode` (asymmetric_int4) into `out_N`, a contiguous tensor on a GPU."""
    _launch(_decode_kernel, out_N, codes, offsets, half_ranges)


def _launch(kernel: Any, flat_N: Tensor, codes: Tensor, offsets: Tensor, half_ranges: Tensor) -> None:
    rows, group_size = codes.shape
    tile = groups_per_program(group_size)
    launch(
        kernel, (cdiv(rows, tile),), flat_N, codes, offsets, half_ranges, flat_N.shape[0], rows, FACTOR,
        T=tile, G=group_size,
    )  # fmt: skip
