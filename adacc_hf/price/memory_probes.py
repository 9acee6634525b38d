"""Strategies that run a block while its memory is measured: a meter records when saved tensors are packed, unpacked and
freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.profile import Shared
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import Strategy
from adacc_hf.tape.inputs import find_external
from adacc_hf.tape.tape import Source, has_storage
from adacc_hf.tape.tiled_rows import in_tiles, watching_tiles
from adacc_hf.torch_glue.memory import MemoryMeter
from adacc_hf.torch_glue.private import storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import local_of
from adacc_hf.torch_glue.zero3 import saved_tensor, without_gathered_memory


class TrackedTensor:
    """Packed form of a saved tensor. When autograd frees this object, the event "release" is recorded."""

    __slots__ = ("companion", "mark", "slot", "tensor")

    def __init__(self, slot: int, tensor: torch.Tensor, companion: Any, mark: Callable[[Any], None]) -> None:
        self.slot = slot
        self.tensor = without_gathered_memory(tensor)
        self.companion = companion
        """Inputs that replay of the block reads, kept alive until autograd has freed all saved tensors of the block."""
        self.mark = mark

    def __del__(self) -> None:
        del self.tensor, self.companion
        self.mark(("release", self.slot))


class SlotProbe:
    """Strategy that retains all saved tensors of a block, and records in a meter when autograd unpacks and frees each
    tensor.

    Some inputs of the block are also read by other blocks. `sources` says where a call finds these inputs. The probe
    keeps them alive, as a replay of the block would.
    """

    def __init__(self, name: str, kind: KindProfile, sources: Sequence[Source]) -> None:
        self.name = name
        self.kind = kind
        self.sources = sources
        self.meter: MemoryMeter | None = None

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = iter(range(len(self.kind.slots)))
        replay_inputs = [find_external(source, block, args, kwargs) for source in self.sources]

        @torch.compiler.disable  # inside a compiled submodule, Dynamo would trace the hooks too
        def pack(tensor: torch.Tensor) -> TrackedTensor:
            return TrackedTensor(next(slots), tensor, replay_inputs, self._mark)

        @torch.compiler.disable
        def unpack(packed: TrackedTensor) -> torch.Tensor:
            self._mark(("unpack", packed.slot))
            return saved_tensor(packed.tensor)

        fn = in_tiles(block, self.kind.tiling, fn)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), watching_tiles(self._mark_tiles):
            return fn(*args)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all activations of the probed block that autograd saves. The probe stores all these activations."""
        return sum(value.nbytes for value in self.kind.activations if value.saved)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the probed block's saved activations that code outside autograd keeps alive until the end of the
        model's forward, under every policy."""
        return sum(value.nbytes for value in self.kind.activations if value.saved and value.cached)

    def _mark_tiles(self, moment: str, module: int) -> None:
        self._mark((f"{moment} tiles", module))

    def _mark(self, event: tuple[str, int]) -> None:
        if self.meter is not None:
            self.meter.mark((*event, self.name))


class ForwardPass:
    """Shared state of all `ForwardProbe`s of one forward: the meter, and the inputs of several blocks that replay would
    hold."""

    def __init__(self, meter: MemoryMeter, shared: Sequence[Shared], last_name: str) -> None:
        self.meter = meter
        self.nonempty_records = {index for index, record in enumerate(shared) if record.nbytes}
        self.last_name = last_name
        """Name of the last block call in the forward."""
        self.replay_inputs: list[torch.Tensor | None] = []
        """Inputs that several blocks share and that replay would read, kept alive until the last block call ends."""
        self.replay_storages = LiveStorages()
        """Storages of the replay inputs. Empty before the last block call ends."""

    def free_replay_inputs(self) -> None:
        """Keep the replay inputs alive no longer."""
        self.replay_storages.add(self.replay_inputs)
        self.replay_inputs.clear()


class LiveStorages:
    """Storages of tensors that other code may keep alive, with weak references."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Add the storages of `tensors`."""
        for tensor in tensors:
            if tensor is not None and has_storage(local_of(tensor)):
                storage = local_of(tensor).untyped_storage()
                self._storages[storage_key(storage)] = StorageWeakRef(storage), storage.nbytes()

    def live(self) -> dict[int, int]:
        """Return the bytes of each storage that is still alive, by storage key."""
        return {key: nbytes for key, (storage, nbytes) in self._storages.items() if not storage.expired()}


class ForwardProbe:
    """Strategy that stores nothing for backward, and records in a meter when a value is first saved and when forward
    frees the value.

    Because nothing is stored, no backward can follow. Some inputs of the block are also read by other blocks. `sources`
    says where a call finds these inputs. The probe keeps them alive, as a replay of the block would.
    """

    def __init__(self, name: str, kind: KindProfile, sources: Sequence[Source], forward_pass: ForwardPass) -> None:
        self.name = name
        self.kind = kind
        self.shared_values = {value.index for value in kind.values if value.shared in forward_pass.nonempty_records}
        """Values whose tensors other blocks hold too. The profile counts each of these tensors once, in
        `Profile.shared`."""
        self.sources = sources
        self.forward_pass = forward_pass

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = iter(self.kind.slots if self.kind.untrusted is None else ())
        replay_inputs = self.forward_pass.replay_inputs
        packed_values: set[int] = set()

        @torch.compiler.disable  # see SlotProbe
        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            value = next(values, None)
            if value == -1 or value in self.shared_values:
                # Other tensors share the storage, or the slot dies in forward: the tensor lives equally long under any
                # policy.
                return tensor.detach()
            if value is not None and value not in packed_values:
                packed_values.add(value)
                self._mark(("pack", value))
                storage = local_of(tensor).untyped_storage()
                weakref.finalize(storage, self._mark, ("death", value), storage.nbytes()).atexit = False
            return None

        with torch.autograd.graph.saved_tensors_hooks(pack, refuse_backward):
            self._mark(("enter", -1))
            replay_inputs += [find_external(source, block, args, kwargs) for source in self.sources]
            with watching_tiles(lambda moment, module: self._mark((f"{moment} tiles", module))):
                result = in_tiles(block, self.kind.tiling, fn)(*args)
        if self.name == self.forward_pass.last_name:
            self.forward_pass.free_replay_inputs()
        self._mark(("leave", -1))
        return result

    def _mark(self, event: tuple[str, int], dying_bytes: int = 0) -> None:
        self.forward_pass.meter.mark((*event, self.name), dying_bytes)


def refuse_backward(_: Any) -> torch.Tensor:
    """Raise ValueError, because autograd unpacks a tensor in a profiling pass without backward.

    The cause is a backward that the model's own code runs before it returns the loss.
    """
    raise ValueError(
        "the loss runs a backward of its own before it is returned, within a block or around it (a gradient penalty, "
        "forces as gradients of an energy, or a loss that embeds small batches one by one, such as "
        "CachedMultipleNegativesRankingLoss, which saves the memory already): train without adacc_hf, or with another "
        "loss"
    )


class CallMarker:
    """Wrapper of a block's strategy that records in a meter when the block's forward ends and when its backward
    starts. If other modules have a backward after that of all blocks, a mark with the label "tail" separates the two.

    The mark "tail" belongs to the first call whose result requires a gradient. To find this call, all markers of a
    model share `trained_calls`, the names of such calls in the current forward. The first call (`is_first`) clears
    them.
    """

    def __init__(
        self,
        name: str,
        inner: Strategy,
        meter: MemoryMeter,
        measurement: Measurement,
        *,
        is_first: bool,
        trained_calls: set[str],
    ) -> None:
        self.name = name
        self.inner = inner
        self.meter = meter
        self.measurement = measurement
        self.is_first = is_first
        self.trained_calls = trained_calls

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_first:
            self.trained_calls.clear()
        result = self.inner.run(block, fn, args, kwargs)
        self.meter.mark(("leave", self.name))
        if self._mark_gradient(result, ("backward", self.name)):
            if not self.trained_calls:  # blocks before this one are frozen, and modules between may be trained
                self._mark_gradient(args, ("tail", self.name))
            self.trained_calls.add(self.name)
        return result

    def _mark_gradient(self, tree: Any, label: tuple[str, str]) -> bool:
        """Set a mark with `label` in the memory meter as soon as the gradient of the first differentiable tensor in
        `tree` is complete. Return False if `tree` has no such tensor."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.measurement.on_gradient(leaf, lambda: self.meter.mark(label))
                return True
        return False
