"""Triton kernels of outlier_int4: one launch to encode, one to decode, one for the channel sums.

A byte holds the 4-bit codes of two elements: one from the first half of the tensor, and the corresponding one from the
second half. Program p therefore encodes T groups of each half: groups [p * T, (p + 1) * T) of the first half, and the
corresponding groups of the second half.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._symmetric import SIGNED_FACTOR
from adacc_hf.kernels._triton import (
    THREAD_ELEMENTS,
    TILE_ELEMENTS,
    cdiv,
    codes_up_to,
    groups_per_program,
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

SUM_ROWS = 64  # rows per program of the sums: 32 KiB of float32, enough programs for any GPU from 2 MiB up
SUM_COLUMNS = 128
LEAST_PADDED = 16  # least number of outliers that kernels are compiled for, because most tensors have few


@triton.jit
def _row_and_column(group, channels, ROW_OF_GROUPS: tl.constexpr, G: tl.constexpr):
    """Return the int64 row and the int32 column of the first element of the group with the index `group`."""
    if ROW_OF_GROUPS:
        groups = (channels // G).to(tl.uint32)
        row, column = group.to(tl.uint32) // groups, (group.to(tl.uint32) % groups).to(tl.int32) * G
    else:
        first = group.to(tl.int64) * G
        row, column = first // channels, first % channels
    return row.to(tl.int64), column.to(tl.int32)


@triton.jit
def _half_a_tensor_on(row, column, half_rows, half_columns, channels):
    """Return the position (row, column) that is N / 2 elements after position (`row`, `column`), in a tensor of N
    elements."""
    column += half_columns
    wraps = (column >= channels).to(tl.int32)
    return row + half_rows + wraps, column - wraps * channels


@triton.jit
def _outliers_cleared(
    x, keep_ptr, first_column, channels, TILE_ROWS: tl.constexpr, ROW_OF_GROUPS: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Return x [T, G] with the elements of outlier channels set to 0. The first element is in column first_column.
    ROW_OF_GROUPS is True if each row consists of whole groups. In this case, no group continues in the next row, and
    the mask of channels, `keep`, is read 128 bits at a time. Example: channels 128, G 64, first_column 64: groups start
    at columns 64, 0, 64, ..."""
    within = tl.arange(0, G)[None, :]
    place = first_column + tl.arange(0, T)[:, None] * G
    if not ROW_OF_GROUPS:
        place += within
    if TILE_ROWS == 2:
        column = tl.where(place < channels, place, place - channels)
    else:
        column = (place.to(tl.uint32) % tl.full([], channels, tl.uint32)).to(tl.int32)
    if ROW_OF_GROUPS:
        column = tl.max_contiguous(tl.multiple_of(column + within, [1, G]), [1, G])
    keep = tl.load(keep_ptr + column)
    return (x.to(keep.dtype, bitcast=True) & keep).to(x.dtype, bitcast=True)


@triton.jit
def _raw_places(
    indices_ptr, first_group, low_row, low_column, high_row, high_column, rows, numel, channels,
    num_outliers, PADDED_OUTLIERS: tl.constexpr, TILE_ROWS: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return, for the outliers in a program's groups, their offsets in the tensor, their offsets among the uncompressed
    values, and a mask. All results have shape [2, TILE_ROWS, PADDED_OUTLIERS], for both halves of the tensor. Each
    program handles the outliers of its own groups, because the elements of these groups are in the program's cache, and
    no other program writes to them."""
    half = tl.arange(0, 2)[:, None, None]
    first = (first_group + half * rows).to(tl.int64) * G
    row = tl.where(half == 0, low_row, high_row)
    column = tl.where(half == 0, low_column, high_column)
    tile_row = tl.arange(0, TILE_ROWS)[None, :, None]
    k = tl.arange(0, PADDED_OUTLIERS)[None, None, :]
    local = tile_row * channels + tl.load(indices_ptr + k, mask=k < num_outliers, other=0) - column
    end = tl.minimum(numel - first, tl.minimum(rows - first_group, T) * G)
    return first + local, (row + tile_row) * num_outliers + k, (k < num_outliers) & (local >= 0) & (local < end)


@triton.jit
def _encode_half(
    x_ptr, peaks_ptr, keep_ptr, first_group, first_column, groups_left, numel, channels, factor,
    PADDED_OUTLIERS: tl.constexpr, TILE_ROWS: tl.constexpr, ROW_OF_GROUPS: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Encode T groups, starting with first_group. Store the peak of each group. Return int32 codes [T, G]. The peak of
    a group is the element with the largest absolute value."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + first + local, mask=local < numel - first, other=0.0)
    if PADDED_OUTLIERS > 0:
        x = _outliers_cleared(x, keep_ptr, first_column, channels, TILE_ROWS, ROW_OF_GROUPS, T, G)
    peak = stored_peak(tl.max(peak_keys(x, True), axis=1), x.dtype)
    tl.store(peaks_ptr + first_group + group, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=group < groups_left)
    return codes_up_to(widened(x) * inverse_of(peak, factor)[:, None] + 8.5, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    peaks_ptr,  # 16-bit [2 * rows]
    keep_ptr,  # integers as wide as x [channels + G]; not read without outliers, nor are the next three
    raw_ptr,  # [numel / channels, num_outliers]
    indices_ptr,  # int32 [num_outliers]
    indices_out_ptr,  # int32 [num_outliers]
    numel,
    rows,
    channels,
    half_rows,
    half_columns,
    num_outliers,
    factor,
    PADDED_OUTLIERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups of each half of the tensor, pack their codes two per byte, and copy the outliers in these
    groups."""
    first_row = tl.program_id(0) * T
    groups_left = rows - first_row
    low_row, low_column = _row_and_column(first_row, channels, ROW_OF_GROUPS, G)
    high_row, high_column = _half_a_tensor_on(low_row, low_column, half_rows, half_columns, channels)
    low = _encode_half(
        x_ptr, peaks_ptr, keep_ptr, first_row, low_column, groups_left, numel, channels, factor,
        PADDED_OUTLIERS, TILE_ROWS, ROW_OF_GROUPS, T, G,
    )  # fmt: skip
    high = _encode_half(
        x_ptr, peaks_ptr, keep_ptr, first_row + rows, high_column, groups_left, numel, channels, factor,
        PADDED_OUTLIERS, TILE_ROWS, ROW_OF_GROUPS, T, G,
    )  # fmt: skip
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    codes = (low | (high << 4)).to(tl.uint8)
    tl.store(codes_ptr + first_row.to(tl.int64) * G + local, codes, mask=group < groups_left)
    if PADDED_OUTLIERS > 0:
        place, raw_place, is_valid = _raw_places(
            indices_ptr, first_row, low_row, low_column, high_row, high_column, rows, numel, channels,
            num_outliers, PADDED_OUTLIERS, TILE_ROWS, T, G,
        )  # fmt: skip
        tl.store(raw_ptr + raw_place, tl.load(x_ptr + place, mask=is_valid), mask=is_valid)
        if first_row == 0:
            k = tl.arange(0, PADDED_OUTLIERS)
            index = tl.load(indices_ptr + k, mask=k < num_outliers, other=0)
            tl.store(indices_out_ptr + k, index, mask=k < num_outliers)


@triton.jit
def _decode_half(
    out_ptr, codes, peaks_ptr, first_group, groups_left, numel, factor, T: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Decode T groups from unpacked int32 codes [T, G] and the groups' peaks, and store the elements."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    peak = widened(tl.load(peaks_ptr + first_group + group, mask=group < groups_left, other=0.0))
    x = rounded_to((codes.to(tl.float32) - 8.0) * (peak * factor)[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + local, x, mask=(group[:, None] < groups_left) & (local < numel - first))


@jit
def _decode_kernel(
    out_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    peaks_ptr,  # 16-bit [2 * rows]
    raw_ptr,  # [numel / channels, num_outliers]; not read without outliers, nor is the next
    indices_ptr,  # int32 [num_outliers]
    numel,
    rows,
    channels,
    half_rows,
    half_columns,
    num_outliers,
    factor,
    PADDED_OUTLIERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROW_OF_GROUPS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Decode T groups of each half of the tensor from codes packed two per byte, and write the outliers in these
    groups."""
    first_row = tl.program_id(0) * T
    groups_left = rows - first_row
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    packed = tl.load(codes_ptr + first_row.to(tl.int64) * G + local, mask=group < groups_left, other=0).to(tl.int32)
    _decode_half(out_ptr, packed & 15, peaks_ptr, first_row, groups_left, numel, factor, T, G)
    _decode_half(out_ptr, packed >> 4, peaks_ptr, first_row + rows, groups_left, numel, factor, T, G)
    if PADDED_OUTLIERS > 0:
        low_row, low_column = _row_and_column(first_row, channels, ROW_OF_GROUPS, G)
        high_row, high_column = _half_a_tensor_on(low_row, low_column, half_rows, half_columns, channels)
        place, raw_place, is_valid = _raw_places(
            indices_ptr, first_row, low_row, low_column, high_row, high_column, rows, numel, channels,
            num_outliers, PADDED_OUTLIERS, TILE_ROWS, T, G,
        )  # fmt: skip
        raw = tl.load(raw_ptr + raw_place, mask=is_valid)
        tl.debug_barrier()  # other threads of this program have just written zeros to the outliers
        tl.store(out_ptr + place, raw, mask=is_valid)


@jit
def _sums_kernel(
    x_ptr,  # [rows, columns]
    partial_ptr,  # float32 [programs along rows, columns]
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store, for each of COLUMNS columns, the sum of magnitudes over the rows of this program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    sums = tl.sum(tl.abs(widened(x)), axis=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, sums, mask=column < columns)


def encode(x_RC: Tensor, outliers: Any, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    """Encode a contiguous matrix on a GPU, as OutlierInt4.encode_traceable does. `outliers` are `Outliers` or None."""
    keep, indices = (None, None) if outliers is None else (outliers.keep, outliers.indices)
    rows, group_size = codes.shape
    larger = 2 if raw else 1  # finding a tile's outliers takes the same number of instructions for a larger tile
    tile = groups_per_program(group_size, larger * TILE_ELEMENTS)
    programs = max(cdiv(rows, tile), 1 if raw else 0)  # even an empty tensor has indices to copy
    raw_out, indices_out = raw or (None, None)
    launch(
        _encode_kernel, (programs,), x_RC, codes, peaks, keep, raw_out, indices, indices_out,
        *_sizes(x_RC, codes, raw), **_outlier_constants(raw, x_RC.shape[1], tile, group_size), T=tile, G=group_size,
        tile=larger * TILE_ELEMENTS, thread_elements=larger * THREAD_ELEMENTS,
    )  # fmt: skip


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    """Decode the results of `encode` (outlier_int4) into `out_RC`, a contiguous matrix on a GPU."""
    rows, group_size = codes.shape
    tile = groups_per_program(group_size)
    launch(
        _decode_kernel, (cdiv(rows, tile),), out_RC, codes, peaks, *(raw or (None, None)),
        *_sizes(out_RC, codes, raw), **_outlier_constants(raw, out_RC.shape[1], tile, group_size), T=tile, G=group_size,
    )  # fmt: skip


def _sizes(x_RC: Tensor, codes: Tensor, raw: tuple[Tensor, ...]) -> tuple[int | float, ...]:
    """Return the numbers that both kernels get, from `numel` to `factor`."""
    rows, channels = codes.shape[0], x_RC.shape[1]
    half = divmod(codes.numel(), channels)
    return x_RC.numel(), rows, channels, *half, raw[1].shape[0] if raw else 0, SIGNED_FACTOR


def channel_sums(x_RC: Tensor) -> Tensor:
    """Return float32 [C]: the sum of magnitudes of each column of a matrix on a GPU. The order of additions is fixed,
    so that equal tensors get equal outliers."""
    rows, columns = x_RC.shape
    programs = cdiv(rows, SUM_ROWS)
    partial = x_RC.new_empty(programs, columns, dtype=torch.float32)
    grid = (programs, cdiv(columns, SUM_COLUMNS))
    launch(_sums_kernel, grid, x_RC, partial, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return partial.sum(0)


def _outlier_constants(raw: tuple[Tensor, ...], channels: int, tile: int, group_size: int) -> dict[str, int]:
    """Return a dict from the names of the encode and decode kernels' compile-time constants to their values."""
    constants = {"PADDED_OUTLIERS": 0, "TILE_ROWS": 0, "ROW_OF_GROUPS": False}
    if raw:
        constants["ROW_OF_GROUPS"] = channels % group_size == 0
        padded = min(max(raw[1].shape[0], LEAST_PADDED), channels)
        constants["PADDED_OUTLIERS"] = next_power_of_2(padded)
        constants["TILE_ROWS"] = next_power_of_2((tile * group_size - 1) // channels + 2)
    return constants
