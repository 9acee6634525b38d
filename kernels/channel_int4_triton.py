"""Triton kernels of channel_int4: one launch to encode, one to decode.

A byte holds the 4-bit codes of two elements: one from the first half of the tensor, and the corresponding one from the
second half. A program therefore handles G rows of COLUMNS columns in each half: G rows of the first half, and the
corresponding G rows of the second half. Consecutive programs handle neighbouring columns, so that concurrent programs
read whole pages of memory.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._symmetric import SIGNED_FACTOR
from adacc_hf.kernels._triton import (
    TILE_ELEMENTS,
    cdiv,
    codes_up_to,
    in_16_bits,
    inverse_of,
    jit,
    launch,
    peak_keys,
    rounded_to,
    stored_peak,
    widened,
)

# Columns per program: for encoding a cache line of bfloat16, for decoding at least the codes of a 128-bit access.
ENCODED_COLUMNS, LEAST_COLUMNS = 64, 16
# Elements of each half that a thread encodes. Reducing a peak over the threads that share a column, and dividing by it,
# has a fixed cost: with 16 elements per thread it was two thirds of the thread's work.
ENCODED_ELEMENTS = 64


@triton.jit
def _first_places(columns, COLUMNS: tl.constexpr):
    """Return (index of a pair of groups, first column) that the running program handles."""
    blocks = (columns + COLUMNS - 1) // COLUMNS
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * COLUMNS


@triton.jit
def _encode_half(
    x_ptr, peaks_ptr, group, first_column, rows, columns, factor,
    G: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encode one group of rows in COLUMNS columns. Store the peak of each column. Return int32 codes [G, COLUMNS]. The
    peak of a column is the element with the largest absolute value among the group's rows."""
    row = group * G + tl.arange(0, G)[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    index = row.to(tl.int64) * columns + column[None, :]
    x = tl.load(x_ptr + index, mask=(row < rows) & (column[None, :] < columns), other=0.0)
    peak = stored_peak(tl.max(peak_keys(x, True), axis=0), x.dtype)
    peak_index = group.to(tl.int64) * columns + column
    tl.store(peaks_ptr + peak_index, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=column < columns)
    return codes_up_to(widened(x) * inverse_of(peak, factor)[None, :] + 8.5, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [pairs * G, columns]
    peaks_ptr,  # 16-bit [2 * pairs, columns]
    rows,
    columns,
    pairs,
    factor,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Encode one group of rows of each half of the tensor, in COLUMNS columns, and pack their codes two per byte."""
    pair, first_column = _first_places(columns, COLUMNS)
    low = _encode_half(x_ptr, peaks_ptr, pair, first_column, rows, columns, factor, G, COLUMNS)
    high = _encode_half(x_ptr, peaks_ptr, pair + pairs, first_column, rows, columns, factor, G, COLUMNS)
    # The codes are stored in another shape. In the same shape, Triton would assign a thread as many columns to encode
    # as codes that it stores at once, twice to four times as many as it loads at once, with a division per column.
    flat = tl.arange(0, G * COLUMNS)
    row, column = pair * G + flat // COLUMNS, first_column + flat % COLUMNS
    codes = (low | (high << 4)).to(tl.uint8).reshape(G * COLUMNS)
    tl.store(codes_ptr + row.to(tl.int64) * columns + column, codes, mask=column < columns)


@triton.jit
def _decode_half(
    out_ptr, codes, peaks_ptr, group, first_column, rows, columns, factor, G: tl.constexpr, COLUMNS: tl.constexpr
):
    """Decode one group of rows from its unpacked int32 codes [G, COLUMNS] and one peak per column."""
    row = group * G + tl.arange(0, G)[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    peak = tl.load(peaks_ptr + group.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    x = (codes.to(tl.float32) - 8.0) * (widened(peak) * factor)[None, :]
    index = row.to(tl.int64) * columns + column[None, :]
    mask = (row < rows) & (column[None, :] < columns)
    tl.store(out_ptr + index, rounded_to(x, out_ptr.dtype.element_ty), mask=mask)


@jit
def _decode_kernel(
    out_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [pairs * G, columns]
    peaks_ptr,  # 16-bit [2 * pairs, columns]
    rows,
    columns,
    pairs,
    factor,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode one group of rows of each half of the tensor, in COLUMNS columns, from codes packed two per byte."""
    pair, first_column = _first_places(columns, COLUMNS)
    row = pair * G + tl.arange(0, G)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    index = row.to(tl.int64) * columns + column
    packed = tl.load(codes_ptr + index, mask=column < columns, other=0).to(tl.int32)
    _decode_half(out_ptr, packed & 15, peaks_ptr, pair, first_column, rows, columns, factor, G, COLUMNS)
    _decode_half(out_ptr, packed >> 4, peaks_ptr, pair + pairs, first_column, rows, columns, factor, G, COLUMNS)


def encode(x_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Encode a contiguous matrix on a GPU, as `ChannelInt4.encode_traceable` does."""
    width = max(TILE_ELEMENTS // codes.shape[1], ENCODED_COLUMNS)
    _launch(_encode_kernel, x_RC, codes, peaks, width, thread_elements=ENCODED_ELEMENTS)


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Decode the results of `encode` (channel_int4) into `out_RC`, a contiguous matrix on a GPU."""
    width = min(max(TILE_ELEMENTS // codes.shape[1], LEAST_COLUMNS), ENCODED_COLUMNS)
    _launch(_decode_kernel, out_RC, codes, peaks, width)


def _launch(kernel: Any, x_RC: Tensor, codes: Tensor, peaks: Tensor, width: int, **options: int) -> None:
    rows, columns = x_RC.shape
    pairs, group_size, _ = codes.shape
    launch(
        kernel, (pairs * cdiv(columns, width),), x_RC, codes, peaks, rows, columns, pairs, SIGNED_FACTOR,
        tile=group_size * width, G=group_size, COLUMNS=width, **options,
    )  # fmt: skip
