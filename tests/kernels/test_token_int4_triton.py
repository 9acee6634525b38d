"""Compiled code of the INT4 kernels with a scale per token (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from triton_round_trips import token_int4

from adacc_hf.kernels import token_int4_triton


class TestCode(KernelCode):
    module = token_int4_triton
    round_trips: ClassVar = {"token_int4": token_int4, "token_int4-long": lambda x: token_int4(x.view(16, -1))}
    one_by_one: ClassVar = {"token_int4-long": None}
