"""Table of devices, with memory and peak rates from data sheets. The rates of this machine's CPU are measured."""

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
    """Memory and peak rates of a device, for predictions. Real programs stay somewhat below the peak rates."""

    name: str
    title: str
    source: str
    """Document that publishes the device's memory and rates."""
    memory_bytes: int
    """Memory size from the data sheet, with 1 GB = 10^9 bytes. Most drivers report a few percent more."""
    bandwidth_bytes: float
    """Bytes per second that the device reads from and writes to its memory."""
    flops: dict[str, float]
    """Dense operations per second of matrix products, by dtype. Training in a dtype that is not listed is not
    supported."""
    launch_ms: float
    """Milliseconds to launch one operator. The launch is assumed to start only when the previous operator has ended."""
    attention_share: float = 1.0
    """Speed of fused attention in operations per second, divided by that of matrix products."""
    unaligned_share: float = 1.0
    """Speed of products of 16-bit matrices whose rows are not multiples of 16 bytes, divided by the speed of all other
    matrix products."""
    host_bandwidth_bytes: float | None = None
    """Bytes per second of copies between the device and pinned memory of the host, in one direction. None if the device
    has no memory of its own."""
    trace: str = "cuda"
    """Device type ("cuda" or "cpu") that the traced fake tensors have. Torch's choice of kernels depends on it."""

    def check_dtype(self, dtype: str) -> None:
        """Raise ValueError if the device cannot train in `dtype`."""
        if dtype not in self.flops:
            raise ValueError(
                f"--device={self.name} cannot train in {dtype}: choose another --dtype, the device supports "
                f"{', '.join(self.flops)}"
            )


_CUDA_LAUNCH_MS = 0.005
"""Milliseconds between two small kernels that torch launches one after the other: about 5 us on the GPUs of the
table."""


_AMPERE_ATTENTION, _HOPPER_ATTENTION = 0.75, 0.5
"""Rate of torch's flash kernels divided by the rate of matrix products, on A100 and H100. FlashAttention-2 reaches 50
to 73 % of an A100's peak (arXiv 2307.08691), and 35 % of an H100's peak (arXiv 2407.08608). Matrix products are assumed
to reach 85 % and 70 %."""


_UNALIGNED = 0.4
"""Estimated `Device.unaligned_share` of GPUs: relative speed of 16-bit matrix products with unaligned rows.

On an H100, the older instructions, which accept rows at any address, reach 63 % of the peak (arXiv 2402.13499), and
asynchronous copies need rows at multiples of at least 4 bytes. On an A100, a step of GPT-2 with 50257 classes was
reported to take a quarter longer than with 50304, which corresponds to a share of about 0.4 for the head's products."""


_PCIE_BYTES = {3: 12 * GB, 4: 24 * GB, 5: 50 * GB}
"""Assumed bytes per second of a copy over 16 lanes of PCIe, by PCIe generation.

The values are about 80 % of the 15.75, 31.5 and 63 GB/s that remain in one direction after encoding (PCI Express Base
Specification: 8, 16 and 32 GT/s, 128b/130b). With pinned memory, 52 to 55 GB/s are reported for H100 SXM. Ranks that
share a switch get less. For them, set `adacc plan --host-bandwidth`.
"""


def _gpu(
    name: str,
    title: str,
    memory_gb: float,
    bandwidth_gb: float,
    tera_flops: Mapping[str, float],
    attention_share: float = _AMPERE_ATTENTION,
    pcie: int = 4,
) -> Device:
    return Device(
        name=name,
        title=f"NVIDIA {title}",
        source=f"NVIDIA's data sheet or white paper on {title.partition(' GB')[0].rpartition(' ')[0]}",
        memory_bytes=int(memory_gb * GB),
        bandwidth_bytes=bandwidth_gb * GB,
        flops={dtype: tera * TERA for dtype, tera in tera_flops.items()},
        launch_ms=_CUDA_LAUNCH_MS,
        attention_share=attention_share,
        unaligned_share=_UNALIGNED,
        host_bandwidth_bytes=_PCIE_BYTES[pcie],
    )


# float32 rates are without TF32, which torch disables by default. Published sparse rates are halved. The white paper's
# 16-bit rates of the RTX 4090 are those with float32 accumulation.
_H100 = {"float32": 67, "float16": 989, "bfloat16": 989}
_A100 = {"float32": 19.5, "float16": 312, "bfloat16": 312}
_L4 = {"float32": 30.3, "float16": 121, "bfloat16": 121}
_RTX_4090 = {"float32": 82.6, "float16": 165.2, "bfloat16": 165.2}

_DEVICES = (
    _gpu("h100", "H100 SXM 80 GB", 80, 3350, _H100, _HOPPER_ATTENTION, pcie=5),
    _gpu("h200", "H200 SXM 141 GB", 141, 4800, _H100, _HOPPER_ATTENTION, pcie=5),
    _gpu("a100", "A100 SXM 80 GB", 80, 2039, _A100),
    _gpu("a100-40gb", "A100 SXM 40 GB", 40, 1555, _A100),
    _gpu("v100", "V100 SXM2 32 GB", 32, 900, {"float32": 15.7, "float16": 125}, pcie=3),
    _gpu("l4", "L4 24 GB", 24, 300, _L4),
    _gpu("rtx4090", "GeForce RTX 4090 24 GB", 24, 1008, _RTX_4090),
)

NAMES = (*(device.name for device in _DEVICES), "cpu")
"""Names that `find_device` accepts."""


def find_device(name: str) -> Device:
    """Return the device called `name`. "cpu" is this machine's CPU, whose rates are measured.

    Raises ValueError for an unknown name.
    """
    if name == "cpu":
        return measure_cpu()
    for device in _DEVICES:
        if device.name == name:
            return device
    raise ValueError(
        f"--device={name} is not in the table of devices: choose from {', '.join(NAMES)}, and set --budget to the "
        f"memory of your device"
    )


# The local CPU as a Device. Measuring its rates takes half a second.

_SIDE = 1024
"""Rows and columns of the square matrices whose product is timed. The product takes 2 billion operations, about 50 ms
on one core."""
_COPIED_BYTES = 64 * 2**20
"""Bytes of the tensor that is copied to measure bandwidth. It is larger than the caches of most CPUs."""


@cache
def measure_cpu() -> Device:
    """Measure the floating-point rate and the memory bandwidth of this machine's CPU. The result is cached.

    The rates are for torch's current number of threads.
    """
    import torch

    from adacc_hf.price.timing import median_ms
    from adacc_hf.torch_glue.memory import total_host_bytes

    cpu = torch.device("cpu")
    source, target = (torch.ones(_COPIED_BYTES // 4, device=cpu) for _ in range(2))
    copied_ms = median_ms(lambda: target.copy_(source), cpu)
    one = torch.ones(1, device=cpu)
    return Device(
        name="cpu",
        title=f"this machine's CPU, {torch.get_num_threads()} threads",
        source="measured here: products of 1024 x 1024 matrices, and a copy of 64 MiB",
        memory_bytes=total_host_bytes(),
        bandwidth_bytes=2 * _COPIED_BYTES / copied_ms * 1e3,
        flops={
            str(dtype).removeprefix("torch."): _measured_cpu_flops(dtype) for dtype in (torch.float32, torch.bfloat16)
        },
        launch_ms=median_ms(lambda: one.add_(1), cpu),
        trace="cpu",
    )


def _measured_cpu_flops(dtype: torch.dtype) -> float:
    import torch

    from adacc_hf.price.timing import median_ms

    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device="cpu")
    return 2 * _SIDE**3 / median_ms(lambda: matrix @ matrix, matrix.device) * 1e3
