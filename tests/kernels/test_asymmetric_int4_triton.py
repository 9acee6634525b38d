"""Compiled code of the asymmetric INT4 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from triton_round_trips import asymmetric_int4

from adacc_hf.kernels import asymmetric_int4_triton


class TestCode(KernelCode):
    module = asymmetric_int4_triton
    round_trips: ClassVar = {"asymmetric_int4": asymmetric_int4}
