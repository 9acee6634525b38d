"""What replaying and storing cost in a compiled graph: bytes moved where operators fuse, measurement where they do not.

Inductor fuses pointwise operators and reductions into the kernels of their neighbours: replaying one costs its
arithmetic and reading what the kernel would not read anyway; storing a value costs writing it in forward and reading
it in backward. Products and attention run by themselves in any case, and are timed.
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
from adacc_hf.partitioner.joint_graph import nbytes_of
from adacc_hf.pricing import median_ms

SAMPLE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does per millisecond."""

    bytes_per_ms: float
    """Bytes moved by a copy, reading and writing counted."""
    arithmetic_ms_per_byte: float
    """Time of a pointwise operator beyond moving its bytes, per byte of its result."""

    def moving_ms(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_ms


@cache
def device_speed(device: torch.device) -> DeviceSpeed:
    """The speed of `device`, measured once: a copy, and tanh, which costs more than most and less than some."""
    with no_dispatch(), torch.no_grad():
        source = torch.rand(SAMPLE_BYTES // 4, device=device)
        target = torch.empty_like(source)
        copy_ms = median_ms(lambda: target.copy_(source), device)
        tanh_ms = median_ms(lambda: torch.tanh(source, out=target), device)
    return DeviceSpeed(2 * SAMPLE_BYTES / copy_ms, max(tanh_ms - copy_ms, 0.0) / SAMPLE_BYTES)


class OperatorTimes:
    """Prices operators, each signature once."""

    def __init__(self) -> None:
        self._timed: dict[Any, float] = {}

    def replay_ms(self, node: fx.Node) -> float:
        """Time that running `node` again in backward adds."""
        results = [made for made in (node, *node.users) if isinstance(made.meta.get("val"), torch.Tensor)]
        if not results:
            return 0.0
        device = results[0].meta["val"].device
        speed = device_speed(device)
        made = nbytes_of(results[0])
        if not op_types().is_fusible(node) or op_types().is_compute_intensive(node):
            return self._timed_ms(node, device)
        read = max(
            (nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), default=0
        )
        reduces = read > 4 * made  # a kernel of its own reads all of its input before others can use the result
        return speed.arithmetic_ms_per_byte * max(read, made) + (speed.moving_ms(read) if reduces else 0.0)

    def _timed_ms(self, node: fx.Node, device: torch.device) -> float:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: _Example.of(read))
        key = (node.target, repr(args), repr(kwargs))
        if key not in self._timed:
            self._timed[key] = _measure(node.target, args, kwargs, device)
        return self._timed[key]


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
        return median_ms(lambda: target(*args, **kwargs), device)
