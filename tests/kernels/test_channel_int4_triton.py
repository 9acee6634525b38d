"""Compiled code of the INT4 kernels with scales per channel (tests/builders/kernel_code.py), checked without a GPU."""

from typing import ClassVar

import torch
from kernel_code import TARGETS, KernelCode, Launch, compile_for
from triton_round_trips import channel_int4, round_trip

from adacc_hf.kernels import channel_int4_triton
from adacc_hf.kernels._symmetric import GROUP_SIZES
from adacc_hf.kernels.codecs import get_codec


class TestCode(KernelCode):
    module = channel_int4_triton
    round_trips: ClassVar = {"channel_int4": channel_int4}

    def test_group_sizes_compile_for_odd_widths(self, launches: list[Launch]) -> None:
        for group_size in GROUP_SIZES:
            round_trip(get_codec("channel_int4", group_size=group_size), torch.ones(7, 33))
        for launch in launches:
            assert compile_for(launch, TARGETS["sm_90"]).asm["ptx"]
