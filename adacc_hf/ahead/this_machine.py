"""The CPU that this runs on as a device of the table: its rates are measured, in half a second."""

from __future__ import annotations

from functools import cache

import psutil
import torch

from adacc_hf.ahead.devices import Device
from adacc_hf.profiling.timing import median_ms

_SIDE = 1024
"""Rows of the square matrices that are multiplied: 2 billion operations, some 50 ms on one core."""
_COPIED_BYTES = 64 * 2**20
"""Larger than the caches of most CPUs."""


@cache
def measure_cpu() -> Device:
    """This machine, with as many threads as torch uses."""
    cpu = torch.device("cpu")
    source, target = (torch.ones(_COPIED_BYTES // 4, device=cpu) for _ in range(2))
    copied_ms = median_ms(lambda: target.copy_(source), cpu)
    one = torch.ones(1, device=cpu)
    return Device(
        name="cpu",
        title=f"this machine's CPU, {torch.get_num_threads()} threads",
        source="measured here: products of 1024 x 1024 matrices, and a copy of 64 MiB",
        memory_bytes=psutil.virtual_memory().total,
        bandwidth_bytes=2 * _COPIED_BYTES / copied_ms * 1e3,
        flops={str(dtype).removeprefix("torch."): _flops(dtype) for dtype in (torch.float32, torch.bfloat16)},
        launch_ms=median_ms(lambda: one.add_(1), cpu),
        trace="cpu",
    )


def _flops(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device="cpu")
    return 2 * _SIDE**3 / median_ms(lambda: matrix @ matrix, matrix.device) * 1e3
