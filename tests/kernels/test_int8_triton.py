"""Compiled code of the int8 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from triton_round_trips import int8

from adacc_hf.kernels import int8_triton


class TestCode(KernelCode):
    module = int8_triton
    round_trips: ClassVar = {"int8": int8}
