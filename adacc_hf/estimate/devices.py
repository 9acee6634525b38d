"""What devices can do, from data sheets or measured here, and what an operator that was never run takes on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch
from torch.utils.flop_counter import flop_registry

from adacc_hf.price.timing import median_ms
from adacc_hf.torch_glue.private import attention_operator, op_name, tree_leaves

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
        return measure_cpu()
    for device in _DEVICES:
        if device.name == name:
            return device
    raise ValueError(
        f"--device={name} is not in the table of devices: choose from {', '.join(NAMES)}, and set --budget to the "
        f"memory of yours"
    )


# The time of an operator that was never run: what the device's peaks allow, plus its launch.


def operator_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    """Milliseconds of one operator: max(operations / peak, bytes moved / bandwidth) + launch.

    Tensors among `args`, `kwargs` and `results` may be fake or on meta. A view takes no time.
    """
    # Torch asks each fake tensor for its device by an operator, prim::device, more often than it computes.
    if target.is_view or target.namespace == "prim":
        return 0.0
    given, made = _tensors((args, kwargs)), _tensors(results)
    moved_ms = 1e3 * sum(map(_touched_bytes, [*given, *made])) / device.bandwidth_bytes
    return max(moved_ms, _product_ms(device, target, args, kwargs, results)) + device.launch_ms


def moved_ms(device: Device, num_bytes: float) -> float:
    """Milliseconds to read or write `num_bytes` in one launch."""
    return 1e3 * num_bytes / device.bandwidth_bytes + device.launch_ms


def _product_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    formula = flop_registry.get(_counted_as(target))
    if formula is None:
        return 0.0
    dtype = str(_tensors((args, kwargs))[0].dtype).removeprefix("torch.")
    rate = device.flops.get(dtype, device.flops["float32"])
    return 1e3 * formula(*_with_all_heads(target, args), **kwargs, out_val=results) / rate


def _counted_as(target: Any) -> Any:
    """The operator whose count of operations stands for that of `target`."""
    if target.overloadpacket is attention_operator("cpu"):
        return attention_operator("flash")
    if target.overloadpacket is attention_operator("cpu_backward"):
        return attention_operator("flash_backward")
    return target.overloadpacket


def _with_all_heads(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args`; for fused attention with a head of keys and values for every head of queries, as the kernels work.

    torch before 2.13 cannot count the operations of fewer.
    """
    if "scaled_dot_product" not in op_name(target):
        return args
    first = 1 if op_name(target).endswith("backward") else 0  # the gradient comes before the queries
    query, key, value = args[first : first + 3]
    heads = [tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]
    return (*args[: first + 1], *heads, *args[first + 3 :])


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of `tensor`; one that is repeated by a stride of 0 is read once."""
    lengths = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(lengths) * tensor.dtype.itemsize if tensor.numel() else 0


def _tensors(tree: Any) -> Sequence[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# The CPU that this runs on as a device of the table: its rates are measured, in half a second.

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
