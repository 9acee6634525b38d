"""Compiled code of the int8 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import int8, int8_triton


def round_trip(x: Tensor, rounding: str) -> None:
    tensors = int8_triton.encode(x.view(-1), 64, int8.FACTOR, rounding, 2**32 - 1)
    int8_triton.decode(x.view(-1), *tensors, int8.FACTOR)


class TestCode(KernelCode):
    module = int8_triton
    round_trips: ClassVar = {
        "int8": lambda x: round_trip(x, "nearest"),
        "int8-stochastic": lambda x: round_trip(x, "stochastic"),
    }
