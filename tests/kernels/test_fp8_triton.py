"""Compiled code of the FP8 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import fp8_triton


def round_trip(x: Tensor) -> None:
    fp8_triton.decode(x, *fp8_triton.encode(x, 128), 128)


class TestCode(KernelCode):
    module = fp8_triton
    round_trips: ClassVar = {"fp8": round_trip}
