"""Compiled code of the bitmask kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from triton_round_trips import bitmask

from adacc_hf.kernels import bitmask_triton


class TestCode(KernelCode):
    module = bitmask_triton
    round_trips: ClassVar = {"bitmask": bitmask}
