"""Compiled code of the asymmetric INT4 kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import asymmetric_int4, asymmetric_int4_triton


def round_trip(x: Tensor, scale: str) -> None:
    formula = (asymmetric_int4.SCALE_FACTORS[scale], asymmetric_int4.OFFSET_CODES[scale])
    tensors = asymmetric_int4_triton.encode(x.view(-1), 64, *formula, "nearest", 0)
    asymmetric_int4_triton.decode(x.view(-1), *tensors, *formula)


class TestCode(KernelCode):
    module = asymmetric_int4_triton
    round_trips: ClassVar = {
        "asymmetric_int4": lambda x: round_trip(x, "range15"),
        "asymmetric_int4-paper": lambda x: round_trip(x, "paper"),
    }
