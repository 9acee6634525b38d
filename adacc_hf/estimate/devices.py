"""What devices can do, from their makers' data sheets, or measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of the table. Rates are peaks that no program quite reaches."""

    name: str
    title: str
    source: str
    """Where the figures are published."""
    memory_bytes: int
    """The data sheet's GB, as 10^9 bytes; drivers mostly report a few percent more."""
    bandwidth_bytes: float
    """Bytes per second between the device and its memory."""
    flops: dict[str, float]
    """Dense operations per second of matrix products, by dtype. A dtype that is missing cannot be trained in."""
    launch_ms: float
    """Time to start one operator, during which nothing else is done by a program that launches one by one."""
    attention_share: float = 1.0
    """Rate of fused attention over that of matrix products, of which its kernels reach less."""
    unaligned_share: float = 1.0
    """Rate of products of 16-bit matrices whose rows are no multiple of 16 bytes over that of others."""
    trace: str = "cuda"
    """Type of device whose decisions torch takes: "cuda" or "cpu"."""


_CUDA_LAUNCH_MS = 0.005
"""Gap between two small kernels that torch launches one by one, about 5 us on the GPUs of the table."""


_AMPERE_ATTENTION, _HOPPER_ATTENTION = 0.75, 0.5
"""Torch's flash kernels over matrix products. FlashAttention-2 reaches 50 to 73 % of an A100's peak (arXiv 2307.08691),
where products are taken to reach 85 %, and 35 % of an H100's (arXiv 2407.08608), where they are taken to reach 70 %."""


_UNALIGNED = 0.4
"""An estimate. On an H100 the older instructions, which take rows at any address, reach 63 % of the peak (arXiv
2402.13499), and asynchronous copies take rows at multiples of 4 bytes at least. On an A100 a step of GPT-2 with 50257
classes was reported to take a quarter longer than with 50304, which is a share of about 0.4 for the head's products."""


def _gpu(
    name: str,
    title: str,
    source: str,
    memory_gb: float,
    bandwidth_gb: float,
    tera_flops: Mapping[str, float],
    attention_share: float = _AMPERE_ATTENTION,
) -> Device:
    return Device(
        name=name,
        title=title,
        source=source,
        memory_bytes=int(memory_gb * GB),
        bandwidth_bytes=bandwidth_gb * GB,
        flops={dtype: tera * TERA for dtype, tera in tera_flops.items()},
        launch_ms=_CUDA_LAUNCH_MS,
        attention_share=attention_share,
        unaligned_share=_UNALIGNED,
    )


# float32 is without TF32, which torch leaves off unless asked. Sparse rates are halved.
_H100 = {"float32": 67, "float16": 989, "bfloat16": 989}
_A100 = {"float32": 19.5, "float16": 312, "bfloat16": 312}

_DEVICES = (
    _gpu("h100", "NVIDIA H100 SXM 80 GB", "NVIDIA H100 Tensor Core GPU data sheet", 80, 3350, _H100, _HOPPER_ATTENTION),
    _gpu(
        "h200", "NVIDIA H200 SXM 141 GB", "NVIDIA H200 Tensor Core GPU data sheet", 141, 4800, _H100, _HOPPER_ATTENTION
    ),
    _gpu("a100", "NVIDIA A100 SXM 80 GB", "NVIDIA A100 Tensor Core GPU data sheet", 80, 2039, _A100),
    _gpu("a100-40gb", "NVIDIA A100 SXM 40 GB", "NVIDIA A100 Tensor Core GPU data sheet", 40, 1555, _A100),
    _gpu(
        "v100",
        "NVIDIA V100 SXM2 32 GB",
        "NVIDIA V100 Tensor Core GPU data sheet",
        32,
        900,
        {"float32": 15.7, "float16": 125},
    ),
    _gpu(
        "l4",
        "NVIDIA L4 24 GB",
        "NVIDIA L4 Tensor Core GPU data sheet",
        24,
        300,
        {"float32": 30.3, "float16": 121, "bfloat16": 121},
    ),
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090 24 GB",
        "NVIDIA Ada GPU Architecture white paper (float16 and bfloat16 with float32 accumulation)",
        24,
        1008,
        {"float32": 82.6, "float16": 165.2, "bfloat16": 165.2},
    ),
)

NAMES = (*(device.name for device in _DEVICES), "cpu")
"""The names that `find_device` knows."""


def find_device(name: str) -> Device:
    """The device called `name`; "cpu" is this machine, measured. Raises ValueError for another."""
    if name == "cpu":
        return measure_cpu()
    for device in _DEVICES:
        if device.name == name:
            return device
    raise ValueError(
        f"--device={name} is not in the table of devices: choose from {', '.join(NAMES)}, and set --budget to the "
        f"memory of yours"
    )


# The CPU that this runs on as a device of the table: its rates are measured, in half a second.

_SIDE = 1024
"""Rows of the square matrices that are multiplied: 2 billion operations, some 50 ms on one core."""
_COPIED_BYTES = 64 * 2**20
"""Larger than the caches of most CPUs."""


@cache
def measure_cpu() -> Device:
    """This machine, with as many threads as torch uses."""
    import psutil
    import torch

    from adacc_hf.price.timing import median_ms

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
    import torch

    from adacc_hf.price.timing import median_ms

    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device="cpu")
    return 2 * _SIDE**3 / median_ms(lambda: matrix @ matrix, matrix.device) * 1e3
