"""Compiled code of the INT4 kernels that keep outliers (tests/builders/kernel_code.py), checked without a GPU."""

from pathlib import Path
from typing import ClassVar

import torch
from kernel_code import CHANNELS, ROWS, TARGETS, KernelCode, Launch, compile_for, spilled, wide_accesses
from triton_round_trips import outlier_int4, round_trip

from adacc_hf.kernels import outlier_int4_triton
from adacc_hf.kernels._symmetric import GROUP_SIZES
from adacc_hf.kernels.codecs import get_codec


class TestCode(KernelCode):
    module = outlier_int4_triton
    varying_arguments: ClassVar = {"num_outliers"}
    round_trips: ClassVar = {"outlier_int4": outlier_int4, "outlier_int4-raw": lambda x: outlier_int4(x, 8)}
    one_by_one: ClassVar = {"outlier_int4-raw": lambda x: outlier_int4(x, 1)}

    def test_channel_sums_compile(self, launches: list[Launch], tmp_path: Path) -> None:
        outlier_int4_triton.channel_sums(torch.ones(ROWS, CHANNELS))
        compiled = compile_for(launches[0], TARGETS["sm_90"])
        assert spilled(compiled, TARGETS["sm_90"], tmp_path) == 0
        assert wide_accesses(compiled.asm["ptx"], "cuda")["loads"] > 0

    def test_group_sizes_compile_for_odd_widths(self, launches: list[Launch]) -> None:
        for group_size in GROUP_SIZES:
            round_trip(get_codec("outlier_int4", group_size=group_size), torch.ones(7, 33))
        for launch in launches:
            assert compile_for(launch, TARGETS["sm_90"]).asm["ptx"]
