"""Strategies that run a block and mark in a meter what happens to the tensors that it saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.profile import KindProfile, Shared
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import Strategy
from adacc_hf.tape.inputs import find_external
from adacc_hf.tape.tape import Source
from adacc_hf.torch_glue.memory import MemoryMeter
from adacc_hf.torch_glue.private import tree_leaves
from adacc_hf.torch_glue.tensors import local_of


class TrackedTensor:
    """A packed object that tells when autograd lets go of it."""

    __slots__ = ("beside", "mark", "slot", "tensor")

    def __init__(self, slot: int, tensor: torch.Tensor, beside: Any, mark: Callable[[Any], None]) -> None:
        self.slot = slot
        self.tensor = tensor
        self.beside = beside
        """What lives as long as any slot of the block."""
        self.mark = mark

    def __del__(self) -> None:
        del self.tensor, self.beside
        self.mark(("release", self.slot))


class WatchSlots:
    """The strategy that retains everything and marks every unpack and release.

    It holds the shared inputs that a replay would read, `held`, as other blocks of its kind do.
    """

    def __init__(self, name: str, kind: KindProfile, held: Sequence[Source]) -> None:
        self.name = name
        self.kind = kind
        self.held = held
        self.meter: MemoryMeter | None = None

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = iter(range(len(self.kind.slots)))
        held = [find_external(source, block, args, kwargs) for source in self.held]

        @torch.compiler.disable  # inside a compiled submodule dynamo would trace the hooks too
        def pack(tensor: torch.Tensor) -> TrackedTensor:
            return TrackedTensor(next(slots), tensor.detach(), held, self._mark)

        @torch.compiler.disable
        def unpack(packed: TrackedTensor) -> torch.Tensor:
            self._mark(("unpack", packed.slot))
            return packed.tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return fn(*args)

    @property
    def stored_bytes(self) -> int:
        """Bytes it keeps: every activation that autograd saves."""
        return sum(value.nbytes for value in self.kind.activations if value.saved)

    @property
    def cached_bytes(self) -> int:
        """Bytes of what it keeps that forward holds anyway until the whole forward ends."""
        return sum(value.nbytes for value in self.kind.activations if value.saved and value.cached)

    def _mark(self, event: tuple[str, int]) -> None:
        if self.meter is not None:
            self.meter.mark((*event, self.name))


class WatchForward:
    """The strategy that stores nothing and marks when a value is saved first and when forward lets go of it.

    The shared inputs that a replay would read, at `sources`, go into `held`: replaying blocks keep them, and outlive
    their other readers. The last block empties `held` at its end. No backward can follow. With `meter` None it only
    drops.
    """

    def __init__(
        self,
        name: str,
        kind: KindProfile,
        meter: MemoryMeter | None,
        sources: Sequence[Source],
        held: list[torch.Tensor | None],
        shared: Sequence[Shared],
        is_last: bool,
    ) -> None:
        self.name = name
        self.kind = kind
        counted = {index for index, record in enumerate(shared) if record.nbytes}
        self.shared = {value.index for value in kind.values if value.shared in counted}
        """Values that count apart from what blocks store."""
        self.sources = sources
        self.held = held
        self.is_last = is_last
        self.meter = meter

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = iter(self.kind.slots if self.kind.untrusted is None else ())
        seen: set[int] = set()

        @torch.compiler.disable  # as in WatchSlots
        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            value = next(values, None)
            if value == -1 or value in self.shared:
                # Held by others, or dead soon, or counted apart: it lives as long as it does under any policy.
                return tensor.detach()
            if self.meter is not None and value is not None and value not in seen:
                seen.add(value)
                self._mark(("pack", value))
                storage = local_of(tensor).untyped_storage()
                weakref.finalize(storage, self._mark, ("death", value), storage.nbytes()).atexit = False
            return None

        with torch.autograd.graph.saved_tensors_hooks(pack, refuse_backward):
            self._mark(("enter", -1))
            self.held += [find_external(source, block, args, kwargs) for source in self.sources]
            result = fn(*args)
        if self.is_last:
            self.held.clear()
        self._mark(("leave", -1))
        return result

    def _mark(self, event: tuple[str, int], dying_bytes: int = 0) -> None:
        if self.meter is not None:
            self.meter.mark((*event, self.name), dying_bytes)


def refuse_backward(_: Any) -> torch.Tensor:
    """Raise ValueError: in a pass of a profile that has no backward of its own, something runs one."""
    raise ValueError(
        "the loss runs a backward of its own before it is returned, within a block or around it (a gradient penalty, "
        "forces as gradients of an energy; a loss that embeds small batches one by one, as "
        "CachedMultipleNegativesRankingLoss, which saves the memory already): train without adacc_hf, or with another "
        "loss"
    )


class MarkCalls:
    """A strategy around another: marks when a block's forward ends and when its backward starts."""

    def __init__(
        self, name: str, inner: Strategy, meter: MemoryMeter, measurement: Measurement, is_first: bool
    ) -> None:
        self.name = name
        self.inner = inner
        self.meter = meter
        self.measurement = measurement
        self.is_first = is_first

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.inner.run(block, fn, args, kwargs)
        self.meter.mark(("leave", self.name))
        self._mark_gradient(result, ("backward", self.name))
        if self.is_first:
            self._mark_gradient(args, ("tail", self.name))
        return result

    def _mark_gradient(self, tree: Any, label: tuple[str, str]) -> None:
        """Mark when the gradient of the first differentiable tensor in `tree` is there."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.measurement.on_gradient(leaf, lambda: self.meter.mark(label))
                return
