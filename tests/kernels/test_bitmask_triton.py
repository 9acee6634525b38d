"""Compiled code of the bitmask kernels (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

import torch
from kernel_code import KernelCode
from torch import Tensor

from adacc_hf.kernels import bitmask_triton


def round_trip(x: Tensor) -> None:
    patterns = x.view(-1).view({4: torch.int32, 2: torch.int8}[x.element_size()])
    bitmask_triton.decode(patterns, *bitmask_triton.encode(patterns, with_pattern=x.element_size() == 4))


class TestCode(KernelCode):
    module = bitmask_triton
    round_trips: ClassVar = {"bitmask": round_trip}
