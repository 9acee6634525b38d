"""Triton kernels of int8: one launch to encode, one to decode."""

from typing import Any

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
from adacc_hf.kernels.int8 import FACTOR


@jit
def _encode_kernel(
    x_ptr,  # [numel]
    codes_ptr,  # uint8 [groups, G]
    peaks_ptr,  # 16-bit [groups]
    numel,
    groups,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Encode T groups in INT8. Store the codes, and the absmax (largest absolute value) of each group."""
    first_group = tl.program_id(0) * T
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + first + local, mask=local < numel - first, other=0.0)
    groups_left = groups - first_group
    peak = stored_peak(tl.max(peak_keys(x, False), axis=1), x.dtype)
    tl.store(peaks_ptr + first_group + group, in_16_bits(peak, peaks_ptr.dtype.element_ty), mask=group < groups_left)
    shifted = widened(x) * inverse_of(peak, factor)[:, None] + 128.5
    codes = clipped_codes(shifted, 1.0, 255.0).to(tl.uint8)
    tl.store(codes_ptr + first + local, codes, mask=group[:, None] < groups_left)


@jit
def _decode_kernel(
    out_ptr,  # [numel]
    codes_ptr,  # uint8 [groups, G]
    peaks_ptr,  # 16-bit [groups]
    numel,
    groups,
    factor,
    T: tl.constexpr,
    G: tl.constexpr,
):
    """Decode T groups from INT8 codes and the absmax (largest absolute value) of each group."""
    first_group = tl.program_id(0) * T
    first = first_group.to(tl.int64) * G
    group = tl.arange(0, T)
    local = group[:, None] * G + tl.arange(0, G)[None, :]
    groups_left = groups - first_group
    codes = tl.load(codes_ptr + first + local, mask=group[:, None] < groups_left, other=0)
    peak = widened(tl.load(peaks_ptr + first_group + group, mask=group < groups_left, other=0.0))
    x = (codes.to(tl.float32) - 128.0) * (peak * factor)[:, None]
    tl.store(out_ptr + first + local, rounded_to(x, out_ptr.dtype.element_ty), mask=local < numel - first)


def encode(flat_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Encode a contiguous tensor on a GPU, as `Int8.encode_traceable` does."""
    _launch(_encode_kernel, flat_N, codes, peaks)


def decode(out_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Decode the results of `encode` (int8) into `out_N`, a contiguous tensor on a GPU."""
    _launch(_decode_kernel, out_N, codes, peaks)


def _launch(kernel: Any, flat_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    groups, group_size = codes.shape
    tile = groups_per_program(group_size)
    grid = (cdiv(groups, tile),)
    launch(kernel, grid, flat_N, codes, peaks, flat_N.shape[0], groups, FACTOR, T=tile, G=group_size)
