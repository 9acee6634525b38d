"""Calls of the Triton kernels: each function encodes and decodes a tensor of [rows, channels]."""

from collections.abc import Callable

import torch
from torch import Tensor

from adacc_hf.kernels import (
    asymmetric_int4_triton,
    bitmask_triton,
    channel_int4_triton,
    fp8_triton,
    int8_triton,
    outlier_int4_triton,
    token_int4_triton,
)
from adacc_hf.kernels.outlier_int4 import choose_outliers


def asymmetric_int4(x: Tensor) -> None:
    asymmetric_int4_triton.decode(x.view(-1), *asymmetric_int4_triton.encode(x.view(-1), 64, 1 / 15), 1 / 15)


def bitmask(x: Tensor) -> None:
    patterns = x.view(-1).view({4: torch.int32, 2: torch.int16}[x.element_size()])
    bitmask_triton.decode(patterns, *bitmask_triton.encode(patterns, with_pattern=x.element_size() == 4))


def channel_int4(x: Tensor) -> None:
    channel_int4_triton.decode(x, *channel_int4_triton.encode(x, 64, -1 / 8), -1 / 8)


def fp8(x: Tensor) -> None:
    fp8_triton.decode(x, *fp8_triton.encode(x, 128), 128)


def int8(x: Tensor) -> None:
    int8_triton.decode(x.view(-1), *int8_triton.encode(x.view(-1), 64))


def outlier_int4(x: Tensor, num_outliers: int = 0) -> None:
    outliers = choose_outliers(x[0].abs().float(), num_outliers, 64, x.element_size()) if num_outliers else None
    arguments = (outliers.indices, outliers.keep) if outliers else (None, None)
    outlier_int4_triton.decode(x, *outlier_int4_triton.encode(x, *arguments, 64))


def token_int4(x: Tensor) -> None:
    token_int4_triton.decode(x, *token_int4_triton.encode(x))


ROUND_TRIPS: dict[str, Callable[[Tensor], None]] = {
    "asymmetric_int4": asymmetric_int4,
    "bitmask": bitmask,
    "channel_int4": channel_int4,
    "int8": int8,
    "outlier_int4": outlier_int4,
    "outlier_int4-raw": lambda x: outlier_int4(x, 3),
    "token_int4": token_int4,
}
"""All but FP8, whose kernels are those of INT8 with another cast."""
