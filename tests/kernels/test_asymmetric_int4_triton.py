"""Compiled code of the asymmetric INT4 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import asymmetric_int4_triton


def round_trip(x: Tensor) -> None:
    asymmetric_int4_triton.decode(x.view(-1), *asymmetric_int4_triton.encode(x.view(-1), 64, 1 / 15), 1 / 15)


class TestCode(KernelCode):
    module = asymmetric_int4_triton
    round_trips: ClassVar = {"asymmetric_int4": round_trip}
