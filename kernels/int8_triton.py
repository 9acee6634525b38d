"""Launches of the Triton kernels of int8: those of fp8, with another rounding. All elements are one row."""

from typing import Any

from torch import Tensor

from adacc_hf.kernels._triton import cdiv, groups_per_program, launch
from adacc_hf.kernels.fp8_triton import decode_kernel, encode_kernel
from adacc_hf.kernels.int8 import FACTOR


def encode(flat_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Encode a contiguous tensor on a GPU, as `Int8.encode_traceable` does."""
    _launch(encode_kernel, flat_N, codes, peaks)


def decode(out_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    """Decode the results of `encode` (int8) into `out_N`, a contiguous tensor on a GPU."""
    _launch(decode_kernel, out_N, codes, peaks)


def _launch(kernel: Any, flat_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    groups, group_size = codes.shape
    tile = groups_per_program(group_size)
    launch(
        kernel, (cdiv(groups, tile),), flat_N, codes, peaks, flat_N.shape[0], groups, FACTOR,
        FP8=False, RAGGED=False, T=tile, G=group_size,
    )  # fmt: skip
