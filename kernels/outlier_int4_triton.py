"""Triton kernels of outlier_int4: one launch to encode, one to decode, one for the channel sums. The channels that
are stored uncompressed are copied by torch.

A byte holds the 4-bit codes of two elements: one from the first half of the tensor, and the corresponding one from the
second half. Program p therefore encodes T groups of each half: groups [p * T, (p + 1) * T) of the first half, and the
corresponding groups of the second half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adacc_hf.kernels._symmetric import SIGNED_FACTOR
from adacc_hf.kernels._triton import (
    cdiv,
    codes_up_to,
    groups_per_program,
    in_16_bits,
    inverse_of,
    jit,
    launch,
    peak_keys,
    rounded_to,
    stored_peak,
    widened,
)
from adacc_hf.kernels.outlier_int4 import Outliers

SUM_ROWS = 64  # rows per program of the sums: 32 KiB of float32, enough programs for any GPU from 2 MiB up
SUM_COLUMNS = 128


@triton.jit
def _outliers_cleared(
    x, keep_ptr, first_group, channels, ROW_OF_GROUPS: tl.constexpr, T: tl.constexpr, G: tl.constexpr
):
    """Return x [T, G], the groups from first_group on, with the elements of outlier channels set to 0. ROW_OF_GROUPS is
    True if each row consists of whole groups. In this case the mask of channels, `keep`, is read 128 bits at a time."""
    group = first_group + tl.arange(0, T)
    within = tl.arange(0, G)[None, :]
    if ROW_OF_GROUPS:
        column = (group.to(tl.uint32) % (channels // G).to(tl.uint32)).to(tl.int32)[:, None] * G + within
        column = tl.max_contiguous(tl.multiple_of(column, [1, G]), [1, G])
    else:  # `keep` repeats, so that only the first column of a group is brought into its range
        column = (group.to(tl.int64) * G % channels).to(tl.int32)[:, None] + within
    keep = tl.load(keep_ptr + column)
    return (x.to(keep.dtype, bitcast=True) & keep).to(x.dtype, bitcast=True)


@triton.jit
def _encode_half(
    x_ptr, peaks_ptr, keep_ptr, first_group, groups_left, numel, channels, factor,
    ROW_OF_GROUPS: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Encode T groups, starting with first_group. Store the peak of each group. Return int32 codes [T, G]. The peak of
    a group is the element with the largest absolute value."""
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + first + local, mask=local < numel - first, other=0.0)
    if keep_ptr is not None:
        x = _outliers_cleared(x, keep_ptr, first_group, channels, ROW_OF_GROUPS, T, G)
    peak = stored_peak(tl.max(peak_keys(x, True), axis=1), x.dtype)
    tl.store(peaks_ptr + first_group + group, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=group < groups_left)
    return codes_up_to(widened(x) * inverse_of(peak, factor)[:, None] + 8.5, 15.0)


@jit
def _encode_kernel(
    x_ptr,  # [numel]
    codes_ptr,  # uint8 [rows, G]
    peaks_ptr,  # 16-bit [2 * rows]
    keep_ptr,  # integers as wide as x [channels + G], or None without outliers
    numel,
    rows,
    channels,
    factor,
    ROW_OF_GROUPS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups of each half of the tensor, with zeros for outliers, and pack their codes two per byte."""
    first_row = tl.program_id(0) * T
    groups_left = rows - first_row
    low = _encode_half(
        x_ptr, peaks_ptr, keep_ptr, first_row, groups_left, numel, channels, factor, ROW_OF_GROUPS, T, G
    )  # fmt: skip
    high = _encode_half(
        x_ptr, peaks_ptr, keep_ptr, first_row + rows, groups_left, numel, channels, factor, ROW_OF_GROUPS, T, G
    )  # fmt: skip
    group = tl.arange(0, T)[:, None]
    local = group * G + tl.arange(0, G)[None, :]
    codes = (low | (high << 4)).to(tl.uint8)
    tl.store(codes_ptr + first_row.to(tl.int64) * G + local, codes, mask=group < groups_left)


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
    _decode_half(out_ptr, packed & 15, peaks_ptr, first_row, groups_left, numel, factor, T, G)
    _decode_half(out_ptr, packed >> 4, peaks_ptr, first_row + rows, groups_left, numel, factor, T, G)


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


def encode(x_RC: Tensor, outliers: Outliers | None, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    """Encode a contiguous matrix on a GPU, as `outlier_int4.encode_ref` does."""
    (rows, group_size), channels = codes.shape, x_RC.shape[1]
    tile = groups_per_program(group_size)
    keep = None if outliers is None else outliers.keep
    launch(
        _encode_kernel, (cdiv(rows, tile),), x_RC, codes, peaks, keep, x_RC.numel(), rows, channels, SIGNED_FACTOR,
        ROW_OF_GROUPS=keep is not None and channels % group_size == 0, T=tile, G=group_size,
    )  # fmt: skip
    if outliers is not None:
        raw[1].copy_(outliers.indices)
        torch.index_select(x_RC, 1, outliers.indices, out=raw[0])


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    """Decode the results of `encode` (outlier_int4) into `out_RC`, a contiguous matrix on a GPU."""
    rows, group_size = codes.shape
    tile = groups_per_program(group_size)
    grid = (cdiv(rows, tile),)
    launch(_decode_kernel, grid, out_RC, codes, peaks, out_RC.numel(), rows, SIGNED_FACTOR, T=tile, G=group_size)
    if raw:
        out_RC.index_copy_(1, raw[1].long(), raw[0])


def channel_sums(x_RC: Tensor) -> Tensor:
    """Return float32 [C]: the sum of magnitudes of each column of a matrix on a GPU. The order of additions is fixed,
    so that equal tensors get equal outliers."""
    rows, columns = x_RC.shape
    programs = cdiv(rows, SUM_ROWS)
    partial = x_RC.new_empty(programs, columns, dtype=torch.float32)
    grid = (programs, cdiv(columns, SUM_COLUMNS))
    launch(_sums_kernel, grid, x_RC, partial, rows, columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS)
    return partial.sum(0)
