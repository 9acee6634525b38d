"""Triton kernels of token_int4: one launch to encode, one to decode.

A byte holds the 4-bit codes of two elements: one from the first half of the tensor, and the corresponding one from the
second half. A program therefore handles whole rows of the first half, and the corresponding rows of the second half.
Rows are read twice, in chunks: first for their peaks, then for their codes. The second read is mostly from the cache.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._triton import (
    TILE_ELEMENTS,
    cdiv,
    codes_up_to,
    in_16_bits,
    inverse_of,
    jit,
    launch,
    next_power_of_2,
    peak_keys,
    rounded_to,
    stored_peak,
    widened,
)
from adacc_hf.kernels.token_int4 import FACTOR

LEAST_BLOCK = 64  # one kernel for all shorter rows


@triton.jit
def _load_rows(x_ptr, first, rows, columns, start, T: tl.constexpr, BLOCK: tl.constexpr):
    """Load [T, BLOCK] elements, starting at row `first` and column `start`. Elements beyond the edges of the matrix
    are 0."""
    row = first + tl.arange(0, T)[:, None]
    column = start + tl.arange(0, BLOCK)[None, :]
    index = row.to(tl.int64) * columns + column
    return tl.load(x_ptr + index, mask=(row < rows) & (column < columns), other=0.0)


@triton.jit
def _finish_rows(keys, peaks_ptr, first, last, factor, dtype: tl.constexpr, T: tl.constexpr):
    """Compute the peaks of T rows from `keys` [T, BLOCK], and store the peaks of those rows below row `last`. The peak
    of a row is the element with the largest absolute value. `keys` are the results of `peak_keys`. Return the
    reciprocal scales of the rows, float32 [T]."""
    peak = stored_peak(tl.max(keys, axis=1), dtype)
    row = first + tl.arange(0, T)
    tl.store(peaks_ptr + row, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=row < last)
    return inverse_of(peak, factor)


@triton.jit
def _int4_codes(x, inverse):
    """Return int32 codes of the elements x [T, BLOCK]. `inverse` contains the reciprocal of each row's scale."""
    return codes_up_to(widened(x) * inverse[:, None] + 8.5, 15.0)


@triton.jit
def _store_codes(codes_ptr, codes, first, pairs, columns, start, T: tl.constexpr, BLOCK: tl.constexpr):
    row = first + tl.arange(0, T)[:, None]
    column = start + tl.arange(0, BLOCK)[None, :]
    index = row.to(tl.int64) * columns + column
    tl.store(codes_ptr + index, codes.to(tl.uint8), mask=(row < pairs) & (column < columns))


@jit
def _encode_kernel(
    x_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [pairs, columns]
    peaks_ptr,  # 16-bit [2 * pairs]
    rows,
    columns,
    pairs,
    factor,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode T rows of each half of the tensor in chunks of BLOCK elements, and pack their codes two per byte."""
    low = tl.program_id(0) * T
    high = low + pairs
    low_x = _load_rows(x_ptr, low, rows, columns, 0, T, BLOCK)
    high_x = _load_rows(x_ptr, high, rows, columns, 0, T, BLOCK)
    low_keys = peak_keys(low_x, False)
    high_keys = peak_keys(high_x, False)
    # The bound is an argument, so that one kernel serves rows of any length. A `while` loop, because the interpreter of
    # Triton 3.6 does not support `range` with such a bound.
    start = BLOCK
    while start < columns:
        start = tl.multiple_of(start, BLOCK)
        low_x = _load_rows(x_ptr, low, rows, columns, start, T, BLOCK)
        high_x = _load_rows(x_ptr, high, rows, columns, start, T, BLOCK)
        low_keys = tl.maximum(low_keys, peak_keys(low_x, False))
        high_keys = tl.maximum(high_keys, peak_keys(high_x, False))
        start += BLOCK
    low_inverse = _finish_rows(low_keys, peaks_ptr, low, pairs, factor, low_x.dtype, T)
    high_inverse = _finish_rows(high_keys, peaks_ptr, high, 2 * pairs, factor, high_x.dtype, T)
    start = 0
    while start < columns:
        start = tl.multiple_of(start, BLOCK)
        low_x = _load_rows(x_ptr, low, rows, columns, start, T, BLOCK)
        high_x = _load_rows(x_ptr, high, rows, columns, start, T, BLOCK)
        codes = _int4_codes(low_x, low_inverse)
        codes |= _int4_codes(high_x, high_inverse) << 4
        _store_codes(codes_ptr, codes, low, pairs, columns, start, T, BLOCK)
        start += BLOCK


@triton.jit
def _decode_half(out_ptr, codes, peaks_ptr, first, last, columns, start, factor, T: tl.constexpr, BLOCK: tl.constexpr):
    """Decode columns of the rows `first` to `last` - 1 from unpacked int32 codes [T, BLOCK], and store the elements."""
    row = first + tl.arange(0, T)
    column = start + tl.arange(0, BLOCK)[None, :]
    peak = widened(tl.load(peaks_ptr + row, mask=row < last, other=0.0))
    x = rounded_to((codes.to(tl.float32) - 8.0) * (peak * factor)[:, None], out_ptr.dtype.element_ty)
    index = row[:, None].to(tl.int64) * columns + column
    tl.store(out_ptr + index, x, mask=(row[:, None] < last) & (column < columns))


@jit
def _decode_kernel(
    out_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [pairs, columns]
    peaks_ptr,  # 16-bit [2 * pairs]
    rows,
    columns,
    pairs,
    factor,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode T rows of each half of the tensor, in BLOCK columns, from codes packed two per byte."""
    low = tl.program_id(0) * T
    start = tl.program_id(1) * BLOCK
    row = low + tl.arange(0, T)[:, None]
    column = start + tl.arange(0, BLOCK)[None, :]
    index = row.to(tl.int64) * columns + column
    packed = tl.load(codes_ptr + index, mask=(row < pairs) & (column < columns), other=0).to(tl.int32)
    _decode_half(out_ptr, packed & 15, peaks_ptr, low, pairs, columns, start, factor, T, BLOCK)
    _decode_half(out_ptr, packed >> 4, peaks_ptr, low + pairs, rows, columns, start, factor, T, BLOCK)


def encode(x_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Encode a contiguous matrix on a GPU, as `TokenInt4.encode_traceable` does."""
    _launch(_encode_kernel, x_RC, codes, peaks)


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Decode the results of `encode` (token_int4) into `out_RC`, a contiguous matrix on a GPU."""
    _launch(_decode_kernel, out_RC, codes, peaks)


def _launch(kernel: Any, x_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    rows, columns = x_RC.shape
    pairs = codes.shape[0]
    block = min(max(next_power_of_2(columns), LEAST_BLOCK), TILE_ELEMENTS)
    tile = TILE_ELEMENTS // block
    grid = (cdiv(pairs, tile), *([cdiv(columns, block)] if kernel is _decode_kernel else []))
    launch(kernel, grid, x_RC, codes, peaks, rows, columns, pairs, FACTOR, T=tile, BLOCK=block)
