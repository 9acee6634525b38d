"""Triton kernels of channel_int4: one launch to encode, one to decode.

A program handles G rows of COLUMNS columns, and the G rows half the tensor away with which they share bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels import _symmetric
from adacc_hf.kernels._triton import (
    TILE_ELEMENTS,
    cdiv,
    clipped_codes,
    in_16_bits,
    inverse_of,
    jit,
    launch,
    peak_keys,
    rounded_to,
    rounding_offset,
    stored_peak,
)

# Columns of a program at most 64 (a cache line of bfloat16), at least 16 (the codes of one 128-bit store).
MIN_COLUMNS, MAX_COLUMNS = 16, 64


@triton.jit
def _encode_half(
    x_ptr,
    peaks_ptr,
    group,
    rows,
    columns,
    factor,
    seed,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """int32 codes [G, COLUMNS] of a group of rows, whose peaks are stored."""
    row = group * G + tl.arange(0, G)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = row.to(tl.int64) * columns + column[None, :]
    x = tl.load(x_ptr + index, mask=(row < rows) & (column[None, :] < columns), other=0.0)
    peak = stored_peak(tl.max(peak_keys(x, SIGNED), axis=0), x.dtype)
    peak_index = group.to(tl.int64) * columns + column
    tl.store(peaks_ptr + peak_index, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=column < columns)
    offset = rounding_offset(index, seed, 8.0, STOCHASTIC)
    return clipped_codes(x.to(tl.float32) * inverse_of(peak, factor)[None, :] + offset, 0.0, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [pairs * G, columns]
    peaks_ptr,  # 16-bit [2 * pairs, columns]
    rows,
    columns,
    pairs,
    factor,
    seed,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pair = tl.program_id(0)
    codes = _encode_half(x_ptr, peaks_ptr, pair, rows, columns, factor, seed, STOCHASTIC, SIGNED, G, COLUMNS)
    codes |= _encode_half(
        x_ptr, peaks_ptr, pair + pairs, rows, columns, factor, seed, STOCHASTIC, SIGNED, G, COLUMNS
    ) << 4  # fmt: skip
    row = pair * G + tl.arange(0, G)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(codes_ptr + row.to(tl.int64) * columns + column, codes.to(tl.uint8), mask=column < columns)


@triton.jit
def _decode_half(out_ptr, codes, peaks_ptr, group, rows, columns, factor, G: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the elements of a group of rows from its int32 codes [G, COLUMNS]."""
    row = group * G + tl.arange(0, G)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    peak = tl.load(peaks_ptr + group.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    x = (codes.to(tl.float32) - 8.0) * (peak.to(tl.float32) * factor)[None, :]
    index = row.to(tl.int64) * columns + column[None, :]
    mask = (row < rows) & (column[None, :] < columns)
    tl.store(out_ptr + index, rounded_to(x, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
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
    pair = tl.program_id(0)
    row = pair * G + tl.arange(0, G)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    index = row.to(tl.int64) * columns + column
    packed = tl.load(codes_ptr + index, mask=column < columns, other=0).to(tl.int32)
    _decode_half(out_ptr, packed & 15, peaks_ptr, pair, rows, columns, factor, G, COLUMNS)
    _decode_half(out_ptr, packed >> 4, peaks_ptr, pair + pairs, rows, columns, factor, G, COLUMNS)


def encode(x_RC: Tensor, group_size: int, factor: float, rounding: str, seed: int) -> tuple[Tensor, Tensor]:
    """As `channel_int4.encode_ref`."""
    rows, columns = x_RC.shape
    groups = _symmetric.even_groups(rows, group_size)
    codes = x_RC.new_empty(groups // 2, group_size, columns, dtype=torch.uint8)
    peaks = x_RC.new_empty(groups, columns, dtype=_symmetric.peak_dtype(x_RC.dtype))
    width = _tile_columns(group_size)
    launch(
        _encode_kernel, (groups // 2, cdiv(columns, width)), x_RC, codes, peaks, rows, columns, groups // 2, factor,
        seed, tile=group_size * width, STOCHASTIC=rounding == "stochastic", SIGNED=factor < 0, G=group_size,
        COLUMNS=width,
    )  # fmt: skip
    return codes, peaks


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor, factor: float) -> None:
    """Fill a contiguous matrix from the tensors of `encode`."""
    rows, columns = out_RC.shape
    pairs, group_size, _ = codes.shape
    width = _tile_columns(group_size)
    launch(
        _decode_kernel, (pairs, cdiv(columns, width)), out_RC, codes, peaks, rows, columns, pairs, factor,
        tile=group_size * width, G=group_size, COLUMNS=width,
    )  # fmt: skip


def _tile_columns(group_size: int) -> int:
    return min(max(TILE_ELEMENTS // group_size, MIN_COLUMNS), MAX_COLUMNS)
