"""Calls of the Triton kernels: each function encodes and decodes a tensor of [rows, channels]."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from adacc_hf.kernels import bitmask_triton
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.kernels.outlier_int4 import choose_outliers


def round_trip(codec: Codec, x: Tensor) -> None:
    kernels = import_module(f"adacc_hf.kernels.{codec.triton}")
    x = x if codec.keeps_rows else x.view(-1)
    codec.decode_by(kernels, x, codec.encode_by(kernels, x))


def bitmask(x: Tensor) -> None:
    patterns = x.view(-1).view({4: torch.int32, 2: torch.int16}[x.element_size()])
    packed = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
    pattern = [patterns.new_empty(1)] if x.element_size() == 4 else []
    bitmask_triton.encode(patterns, packed, *pattern)
    bitmask_triton.decode(patterns, packed, *pattern)


def outlier_int4(x: Tensor, num_outliers: int = 0) -> None:
    codec = get_codec("outlier_int4", num_outliers=num_outliers)
    if num_outliers:
        codec.outliers = choose_outliers(x[0].abs().float(), num_outliers, 64, x.element_size())
    round_trip(codec, x)


asymmetric_int4, channel_int4, fp8, int8, token_int4 = (
    partial(round_trip, get_codec(name)) for name in ("asymmetric_int4", "channel_int4", "fp8", "int8", "token_int4")
)
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
