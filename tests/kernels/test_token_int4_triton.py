"""Compiled code of the INT4 kernels with a scale per token (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import token_int4_triton


def round_trip(x: Tensor) -> None:
    token_int4_triton.decode(x, *token_int4_triton.encode(x))


class TestCode(KernelCode):
    module = token_int4_triton
    round_trips: ClassVar = {"token_int4": round_trip, "token_int4-long": lambda x: round_trip(x.view(16, -1))}
    one_by_one: ClassVar = {"token_int4-long": None}
