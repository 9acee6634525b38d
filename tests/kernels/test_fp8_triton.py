"""Compiled code of the FP8 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from triton_round_trips import fp8

from adacc_hf.kernels import fp8_triton


class TestCode(KernelCode):
    module = fp8_triton
    round_trips: ClassVar = {"fp8": fp8}
