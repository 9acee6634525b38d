"""What replaying and storing cost in a compiled graph: bytes moved where operators fuse, measurement where they do not.

Inductor fuses pointwise operators and reductions into the kernels of their neighbours: replaying one costs little but
what it reads and writes beyond what those do, unless it is a function such as tanh; storing a value costs writing it in
forward and reading it in backward. Products and attention run by themselves in any case, and are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._mode_utils import no_dispatch

from adacc_hf.partitioner.functorch import hint, op_types
from adacc_hf.partitioner.joint_graph import is_held, nbytes_of, root_of
from adacc_hf.profiling.timing import REPEATS, median_ms

LARGE_BYTES = 64 * 2**20
"""More than caches hold: what is stored is read again when much else was in between."""
CACHED_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Elements that stay in the cache, so that arithmetic is timed and not memory; enough to fill the device."""

CHEAP = {"cpu": 0.1, "cuda": 0.02}
"""Arithmetic of an ordinary operator in a fused kernel, as a part of moving what it reads and makes. On a CPU a kernel
of six took no longer than one of one. A GPU such as the H100 issues 70 instructions of threads while its memory reads
and writes a number in float32."""

aten = torch.ops.aten
FUNCTIONS = (
    aten.exp, aten.exp2, aten.expm1, aten.log, aten.log1p, aten.log2, aten.tanh, aten.sigmoid, aten.erf, aten.erfc,
    aten.sin, aten.cos,
)  # fmt: skip
"""Take longer than moving what they read, on a CPU."""

CPU_BOOL_MS = 5e-6
"""Inductor writes a mask to memory element by element on a CPU: 2**20 of them take 5 ms more than packed to bits."""


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in which time."""

    bytes_per_ms: float
    """Bytes moved by a copy, reading and writing counted."""
    cheap: float
    """As CHEAP."""

    def moving_ms(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_ms

    def pointwise_ms(self, nbytes: float) -> float:
        """Arithmetic of an ordinary operator in a fused kernel, on a tensor of `nbytes`."""
        return self.cheap * self.moving_ms(2 * nbytes)


@cache
def device_speed(device: torch.device) -> DeviceSpeed:
    """The speed of `device`, measured once."""
    with no_dispatch(), torch.no_grad():
        source = torch.zeros(LARGE_BYTES // 4, device=device)
        target = torch.empty_like(source)
        copy_ms = least_ms(lambda: target.copy_(source), device)
    return DeviceSpeed(2 * LARGE_BYTES / copy_ms, CHEAP["cpu" if device.type == "cpu" else "cuda"])


@cache
def function_ms(function: Any, device: torch.device) -> float:
    """Time per element of a function of FUNCTIONS beyond that of an ordinary operator, measured once."""
    with no_dispatch(), torch.no_grad():
        sample = torch.linspace(0.1, 2.0, CACHED_ELEMENTS[device.type], device=device)
        result = torch.empty_like(sample)
        own, ordinary = (
            least_ms(lambda op=op: op(sample, out=result), device) for op in (function.out, torch.ops.aten.neg.out)
        )
    return max(own - ordinary, 0.0) / sample.numel()


def least_ms(run: Callable[[], object], device: torch.device) -> float:
    """Least time of some runs: what else the machine does makes them slower only."""
    return min(median_ms(run, device, repeats=1) for _ in range(REPEATS))


def keep_ms(node: fx.Node) -> float:
    """Time to write a value in forward and read it in backward; what a product makes or reads is written anyway."""
    nbytes, device = nbytes_of(node), node.meta["val"].device
    is_written = node.op == "placeholder" or not op_types().is_fusible(root_of(node)) or is_held(node)
    writing = 0.0
    if not is_written and device.type == "cpu" and node.meta["val"].dtype is torch.bool:
        writing = CPU_BOOL_MS * hint(node.meta["val"].numel())
    return writing + device_speed(device).moving_ms(nbytes * (1 if is_written else 2))


class OperatorTimes:
    """Prices operators, each signature once."""

    def __init__(self) -> None:
        self._timed: dict[Any, float] = {}

    def replay_ms(self, node: fx.Node) -> float:
        """Time that running `node` again in backward adds."""
        parts = [node] if isinstance(node.meta.get("val"), torch.Tensor) else list(node.users)
        results = [part for part in parts if isinstance(part.meta.get("val"), torch.Tensor)]
        if not results:
            return 0.0
        device = results[0].meta["val"].device
        if not op_types().is_fusible(node) or op_types().is_compute_intensive(node):
            return self._timed_ms(node, device)
        return _fused_ms(node, results, device)

    def _timed_ms(self, node: fx.Node, device: torch.device) -> float:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: _Example.of(read))
        key = (node.target, repr(args), repr(kwargs))
        if key not in self._timed:
            self._timed[key] = _measure(node.target, args, kwargs, device)
        return self._timed[key]


def _fused_ms(node: fx.Node, results: list[fx.Node], device: torch.device) -> float:
    """Time that an operator adds to the kernel that it is fused into."""
    speed, made = device_speed(device), nbytes_of(results[0])
    read = max((nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), default=0)
    ms = speed.pointwise_ms(max(read, made))
    if read > 4 * made:  # a kernel of its own reads all of its input before others can use the result
        ms += speed.moving_ms(read)
    if any(is_held(result) for result in results):  # a product reads it from memory
        ms += speed.moving_ms(2 * made)
    function = getattr(node.target, "overloadpacket", None)
    if function in FUNCTIONS:
        ms += function_ms(function, device) * hint(results[0].meta["val"].numel())
    return ms


@dataclass(frozen=True)
class _Example:
    """The layout of an argument, from which a tensor like it can be made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return hint(value)
        if not isinstance(value, torch.Tensor):
            return None
        return cls(_hinted(value.shape), _hinted(value.stride()), value.dtype, value.device)

    def make(self) -> torch.Tensor:
        # Filled flat: an expanded tensor has several elements in one place.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        flat = torch.zeros(max(extent, 0), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            generator = torch.Generator(self.device).manual_seed(0)  # the model's own draws must not move
            flat.uniform_(-1.0, 1.0, generator=generator)
        return flat.as_strided(self.size, self.stride)


def _hinted(sizes: Any) -> tuple[int, ...]:
    return tuple(hint(size) for size in sizes)


def _measure(target: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> float:
    with no_dispatch(), torch.no_grad():
        args, kwargs = torch.utils._pytree.tree_map_only(_Example, _Example.make, (args, kwargs))
        return least_ms(lambda: target(*args, **kwargs), device)
