"""Triton kernels of outlier_int4: one launch to encode, one to decode, one for the channel sums.

Program p encodes groups [p * T, (p + 1) * T) and their partners half the tensor away, with which they share bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels import _symmetric
from adacc_hf.kernels._triton import (
    cdiv,
    clipped_codes,
    groups_per_program,
    in_16_bits,
    inverse_of,
    jit,
    launch,
    peak_keys,
    rounded_to,
    rounding_offset,
    stored_peak,
)

SUM_ROWS = 64  # rows that one program sums: 32 KiB of float32, enough programs for any GPU from 2 MiB up
SUM_COLUMNS = 128
COPIED_INDICES = tl.constexpr(64)  # at a time, by one program: few channels are outliers


@triton.jit
def _places(first, channels, ROW_OF_GROUPS: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    """Row and column of T groups' elements from flat index `first` on, each broadcastable to [T, G].

    ROW_OF_GROUPS says that groups divide rows: then one division serves a group, and slots are read 128 bits at a time.
    Example: channels 128, G 64, first 192 (row 1, column 64): groups start at columns 64, 0, ... of rows 1, 2, ...
    """
    group = tl.arange(0, T)[:, None]
    within = tl.arange(0, G)[None, :]
    start = (first % channels).to(tl.int32)
    if ROW_OF_GROUPS:
        place = start + group * G
        row, column = place // channels, place % channels + within
    else:
        place = start + group * G + within
        row, column = place // channels, place % channels
    return first // channels + row, column


@triton.jit
def _encode_half(
    x_ptr,
    peaks_ptr,
    slots_ptr,
    raw_ptr,
    first_group,
    groups_left,
    numel,
    channels,
    num_outliers,
    factor,
    seed,
    HAS_OUTLIERS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """int32 codes [T, G] of the groups from first_group on, whose peaks and raw channels are stored."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    there = (group[:, None] < groups_left) & (local < numel - first)
    x = tl.load(x_ptr + first + local, mask=there, other=0.0)
    if HAS_OUTLIERS:
        row, column = _places(first, channels, ROW_OF_GROUPS, T, G)
        slot = tl.load(slots_ptr + column)
        tl.store(raw_ptr + row * num_outliers + slot, x, mask=there & (slot >= 0))
        x = tl.where(slot >= 0, 0.0, x)
    peak = stored_peak(tl.max(peak_keys(x, SIGNED), axis=1), x.dtype)
    tl.store(peaks_ptr + first_group + group, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=group < groups_left)
    offset = rounding_offset(first + local, seed, 8.0, STOCHASTIC)
    return clipped_codes(x.to(tl.float32) * inverse_of(peak, factor)[:, None] + offset, 0.0, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    peaks_ptr,  # 16-bit [2 * rows]
    slots_ptr,  # int32 [channels]; not read without outliers, nor are the next three
    raw_ptr,  # [numel / channels, num_outliers]
    indices_ptr,  # int32 [num_outliers]
    indices_out_ptr,  # int32 [num_outliers]
    numel,
    rows,
    channels,
    num_outliers,
    factor,
    seed,
    HAS_OUTLIERS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    first_row = tl.program_id(0) * T
    left = rows - first_row
    low = _encode_half(
        x_ptr, peaks_ptr, slots_ptr, raw_ptr, first_row, left, numel, channels, num_outliers,
        factor, seed, HAS_OUTLIERS, ROW_OF_GROUPS, STOCHASTIC, SIGNED, T, G,
    )  # fmt: skip
    high = _encode_half(
        x_ptr, peaks_ptr, slots_ptr, raw_ptr, first_row + rows, left, numel, channels, num_outliers,
        factor, seed, HAS_OUTLIERS, ROW_OF_GROUPS, STOCHASTIC, SIGNED, T, G,
    )  # fmt: skip
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    codes = (low | (high << 4)).to(tl.uint8)
    tl.store(codes_ptr + first_row.to(tl.int64) * G + local, codes, mask=group < left)
    if HAS_OUTLIERS and first_row == 0:
        for copied in range(0, num_outliers, COPIED_INDICES):
            k = copied + tl.arange(0, COPIED_INDICES)
            index = tl.load(indices_ptr + k, mask=k < num_outliers, other=0)
            tl.store(indices_out_ptr + k, index, mask=k < num_outliers)


@triton.jit
def _decode_half(
    out_ptr,
    codes,
    peaks_ptr,
    slots_ptr,
    raw_ptr,
    first_group,
    groups_left,
    numel,
    channels,
    num_outliers,
    factor,
    HAS_OUTLIERS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Store the elements of T groups from their int32 codes [T, G] and peaks, and the raw channels among them."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    there = (group[:, None] < groups_left) & (local < numel - first)
    peak = tl.load(peaks_ptr + first_group + group, mask=group < groups_left, other=0.0).to(tl.float32)
    x = rounded_to((codes.to(tl.float32) - 8.0) * (peak * factor)[:, None], out_ptr.dtype.element_ty)
    if HAS_OUTLIERS:
        row, column = _places(first, channels, ROW_OF_GROUPS, T, G)
        slot = tl.load(slots_ptr + column)
        raw = tl.load(raw_ptr + row * num_outliers + slot, mask=there & (slot >= 0), other=0.0)
        x = tl.where(slot >= 0, raw, x)
    tl.store(out_ptr + first + local, x, mask=there)


@jit
def _decode_kernel(
    out_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    peaks_ptr,  # 16-bit [2 * rows]
    slots_ptr,  # int32 [channels]; not read without outliers, nor is the next
    raw_ptr,  # [numel / channels, num_outliers]
    numel,
    rows,
    channels,
    num_outliers,
    factor,
    HAS_OUTLIERS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    first_row = tl.program_id(0) * T
    left = rows - first_row
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    packed = tl.load(codes_ptr + first_row.to(tl.int64) * G + local, mask=group < left, other=0).to(tl.int32)
    _decode_half(
        out_ptr, packed & 15, peaks_ptr, slots_ptr, raw_ptr, first_row, left, numel, channels, num_outliers,
        factor, HAS_OUTLIERS, ROW_OF_GROUPS, T, G,
    )  # fmt: skip
    _decode_half(
        out_ptr, packed >> 4, peaks_ptr, slots_ptr, raw_ptr, first_row + rows, left, numel, channels, num_outliers,
        factor, HAS_OUTLIERS, ROW_OF_GROUPS, T, G,
    )  # fmt: skip


@triton.jit
def _sums_kernel(
    x_ptr,  # [rows, columns]
    partial_ptr,  # float32 [programs along rows, columns]
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    sums = tl.sum(tl.abs(x.to(tl.float32)), axis=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, sums, mask=column < columns)


def encode(
    x_RC: Tensor,
    indices: Tensor | None,
    slots: Tensor | None,
    group_size: int,
    factor: float,
    rounding: str,
    seed: int,
) -> tuple[Tensor, ...]:
    """As `outlier_int4.encode_ref`; slots int32 [C] is a channel's place among the indices, or -1."""
    rows_R, channels = x_RC.shape
    groups = _symmetric.even_groups(x_RC.numel(), group_size)
    codes = x_RC.new_empty(groups // 2, group_size, dtype=torch.uint8)
    peaks = x_RC.new_empty(groups, dtype=_symmetric.peak_dtype(x_RC.dtype))
    raw: tuple[Tensor, ...] = ()
    count = 0 if indices is None else indices.shape[0]
    if indices is not None:
        raw = (x_RC.new_empty(rows_R, count), torch.empty_like(indices))
    tile = groups_per_program(group_size)
    programs = max(cdiv(groups // 2, tile), 1 if raw else 0)  # even an empty tensor has indices to copy
    launch(
        _encode_kernel, (programs,), x_RC, codes, peaks, slots, raw[0] if raw else None,
        indices, raw[1] if raw else None, x_RC.numel(), groups // 2, channels, count, factor, seed,
        HAS_OUTLIERS=bool(raw), ROW_OF_GROUPS=channels % group_size == 0,
        STOCHASTIC=rounding == "stochastic", SIGNED=factor < 0, T=tile, G=group_size,
    )  # fmt: skip
    return codes, peaks, *raw


def decode(out_RC: Tensor, slots: Tensor | None, factor: float, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    """Fill a contiguous matrix from the tensors of `encode`."""
    rows, group_size = codes.shape
    channels, tile = out_RC.shape[1], groups_per_program(group_size)
    launch(
        _decode_kernel, (cdiv(rows, tile),), out_RC, codes, peaks, slots, raw[0] if raw else None, out_RC.numel(),
        rows, channels, raw[1].shape[0] if raw else 0, factor, HAS_OUTLIERS=bool(raw),
        ROW_OF_GROUPS=channels % group_size == 0, T=tile, G=group_size,
    )  # fmt: skip


def channel_sums(x_RC: Tensor) -> Tensor:
    """float32 [C]: sums of magnitudes. Summed in a fixed order, so that equal tensors get equal outliers."""
    rows, columns = x_RC.shape
    programs = cdiv(rows, SUM_ROWS)
    partial = x_RC.new_empty(programs, columns, dtype=torch.float32)
    grid = (programs, cdiv(columns, SUM_COLUMNS))
    launch(_sums_kernel, grid, x_RC, partial, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return partial.sum(0)
