"""Triton kernels of fp8 and int8, which differ in rounding only: one launch to encode, one to decode.

Rounding to FP8 is integer arithmetic, because Triton's own cast to FP8 needs sm_89: see `fp8.py`. If rows consist of
whole groups, all rows are treated as one long row. Other rows end in a group of fewer elements.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

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
    stored_peak,
    widened,
)
from adacc_hf.kernels.fp8 import FACTOR


@triton.jit
def _group_places(groups, columns, FP8: tl.constexpr, RAGGED: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    """Return the groups [T] that the running program handles, the int64 indices of their elements [T, G], a mask of the
    elements and a mask of their codes. No element lies beyond the end of a row, and no code of FP8. RAGGED is True if
    rows end in a shorter group."""
    first_group = tl.program_id(0) * T
    group = first_group + tl.arange(0, T)
    if RAGGED:
        per_row = (columns + G - 1) // G
        row = group // per_row
        column = ((group - row * per_row) * G)[:, None] + tl.arange(0, G)[None, :]
        index = (row.to(tl.int64) * columns)[:, None] + column
        is_valid = (column < columns) & (group[:, None] < groups)
    else:
        first = first_group.to(tl.int64) * G
        local = tl.arange(0, T)[:, None] * G + tl.arange(0, G)[None, :]
        index = first + local
        is_valid = local < columns - first
    return group, index, is_valid, is_valid if FP8 else group[:, None] < groups


@triton.jit
def _fp8_codes(scaled):
    """Convert scaled float32 elements to uint8 E4M3 codes, by the formulas of `fp8.codes_ref`, with the same names of
    variables."""
    bits = scaled.to(tl.int32, bitcast=True)
    above = tl.maximum((bits & 0x7F800000) - (121 << 23), 0)
    steps = tl.abs(scaled) * ((136 << 23) - above).to(tl.float32, bitcast=True)
    # Adding 2^23, whose last place is 1, rounds a number to nearest even.
    rounded_steps = (steps + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    magnitude = tl.minimum((above >> 20) + rounded_steps, 126)
    return (magnitude | ((bits >> 24) & 128)).to(tl.uint8)


@jit
def encode_kernel(
    x_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [rows, columns]; for INT8, the last group is whole
    peaks_ptr,  # 16-bit [groups]
    columns,
    groups,
    factor,
    FP8: tl.constexpr,
    RAGGED: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups in FP8 or INT8, and store their codes and peaks. The peak of a group is the largest absolute
    value."""
    group, index, is_valid, has_code = _group_places(groups, columns, FP8, RAGGED, T, G)
    x = tl.load(x_ptr + index, mask=is_valid, other=0.0)
    peak = stored_peak(tl.max(peak_keys(x, False), axis=1), x.dtype)
    tl.store(peaks_ptr + group, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=group < groups)
    scaled = widened(x) * inverse_of(peak, factor)[:, None]
    codes = _fp8_codes(scaled) if FP8 else clipped_codes(scaled + 128.5, 1.0, 255.0).to(tl.uint8)
    tl.store(codes_ptr + index, codes, mask=has_code)


@jit
def decode_kernel(
    out_ptr,  # [rows, columns]
    codes_ptr,  # uint8 [rows, columns]
    peaks_ptr,  # 16-bit [groups]
    columns,
    groups,
    factor,
    FP8: tl.constexpr,
    RAGGED: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Decode T groups from their FP8 or INT8 codes and peaks. The peak of a group is the largest absolute value."""
    group, index, is_valid, has_code = _group_places(groups, columns, FP8, RAGGED, T, G)
    codes = tl.load(codes_ptr + index, mask=has_code, other=0).to(tl.int32)
    peak = widened(tl.load(peaks_ptr + group, mask=group < groups, other=0.0))
    if FP8:
        # The bits of a code, moved into a float16, represent 2^-8 times the code's number.
        numbers = (((codes & 128) << 8) | ((codes & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        x = numbers.to(tl.float32) * (peak * factor * 256.0)[:, None]
    else:
        x = (codes.to(tl.float32) - 128.0) * (peak * factor)[:, None]
    tl.store(out_ptr + index, rounded_to(x, out_ptr.dtype.element_ty), mask=is_valid)


def encode(x_RC: Tensor, codes: Tensor, peaks: Tensor, group_size: int) -> None:
    """Encode a contiguous matrix in FP8 on a GPU, as `Fp8.encode_traceable` does."""
    _launch(encode_kernel, x_RC, codes, peaks, group_size)


def decode(out_RC: Tensor, codes: Tensor, peaks: Tensor, group_size: int) -> None:
    """Decode the results of `encode` (fp8) into `out_RC`, a contiguous matrix on a GPU."""
    _launch(decode_kernel, out_RC, codes, peaks, group_size)


def _launch(kernel: Any, x_RC: Tensor, codes: Tensor, peaks: Tensor, group_size: int) -> None:
    rows, columns = x_RC.shape
    groups, tile = peaks.shape[0], groups_per_program(group_size)
    is_ragged = columns % group_size != 0 and rows != 1  # rows end in a shorter group
    launch(
        kernel, (cdiv(groups, tile),), x_RC, codes, peaks, columns if is_ragged else rows * columns, groups, FACTOR,
        FP8=True, RAGGED=is_ragged, T=tile, G=group_size,
    )  # fmt: skip
