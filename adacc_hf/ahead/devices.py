"""What devices can do, from their makers' data sheets: for prices of what was never run."""

from __future__ import annotations

from dataclasses import dataclass

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
    trace: str = "cuda"
    """Type of device whose decisions torch takes: "cuda" or "cpu"."""


_CUDA_LAUNCH_MS = 0.005
"""Gap between two small kernels that torch launches one by one, about 5 us on the GPUs of the table."""


def _gpu(
    name: str, title: str, source: str, memory_gb: float, bandwidth_gb: float, tera_flops: dict[str, float]
) -> Device:
    return Device(
        name=name,
        title=title,
        source=source,
        memory_bytes=int(memory_gb * GB),
        bandwidth_bytes=bandwidth_gb * GB,
        flops={dtype: tera * TERA for dtype, tera in tera_flops.items()},
        launch_ms=_CUDA_LAUNCH_MS,
    )


# float32 is without TF32, which torch leaves off unless asked. Sparse rates are halved.
_H100 = {"float32": 67, "float16": 989, "bfloat16": 989}
_A100 = {"float32": 19.5, "float16": 312, "bfloat16": 312}

_DEVICES = (
    _gpu("h100", "NVIDIA H100 SXM 80 GB", "NVIDIA H100 Tensor Core GPU data sheet", 80, 3350, _H100),
    _gpu("h200", "NVIDIA H200 SXM 141 GB", "NVIDIA H200 Tensor Core GPU data sheet", 141, 4800, _H100),
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
        from adacc_hf.ahead.this_machine import measure_cpu

        return measure_cpu()
    for device in _DEVICES:
        if device.name == name:
            return device
    raise ValueError(
        f"--device={name} is not in the table of devices: choose from {', '.join(NAMES)}, and set --budget to the "
        f"memory of yours"
    )
