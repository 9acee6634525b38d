"""Compiled code of the int8 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import int8_triton


def round_trip(x: Tensor) -> None:
    int8_triton.decode(x.view(-1), *int8_triton.encode(x.view(-1), 64))


class TestCode(KernelCode):
    module = int8_triton
    round_trips: ClassVar = {"int8": round_trip}
