"""One recorded call of a block: its tape, and what it saved until a plan takes over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adacc_hf.execution.call import Call, changed_in_place
from adacc_hf.kernels.codecs import Codec
from adacc_hf.tapes.compiled import CompiledPlan
from adacc_hf.tapes.drawing import Drawing
from adacc_hf.tapes.hidden_code import CHANGED_UNSEEN, COMPILED, runs_compiled_code
from adacc_hf.tapes.recorder import Recorder
from adacc_hf.tapes.tape import Source


class Packed:
    """What autograd holds for one slot: the slot's number, what is stored for it, and the version of that."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.content: tuple[int, Any, int | None] = (slot, tensor.detach(), tensor._version)


class Recording:
    """One recorded call of a block. Its saved tensors can be handed over to a compiled plan when it is over."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        drawing: type[Drawing] = Drawing,
    ) -> None:
        self.name = name
        self.block = block
        self.recorder = Recorder(block, args, kwargs, drawing)
        self._arguments = (args, kwargs)
        self._parameters = dict(block.named_parameters(remove_duplicate=False))
        self._packed: list[Packed] = []
        self._call: Call | None = None

    def run(self, fn: Callable[..., Any]) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with self.recorder.naming_modules(), self.recorder.watching_reads(), hooks, self.recorder:
            result = fn(*self._arguments[0])
        if runs_compiled_code(result, self._arguments):
            self.recorder.untrusted = COMPILED
        elif any(map(self._was_changed_unseen, self._packed)):
            self.recorder.untrusted = self.recorder.untrusted or CHANGED_UNSEEN
        return result

    def hand_over(self, compiled: CompiledPlan, codecs: dict[int, Codec]) -> list[int]:
        """Store what the plan stores and let go of the rest; returns the list that the order of unpacks goes into."""
        externals = [(value, self._external(value, source)) for value, source in compiled.externals]
        self._call = Call(compiled, self.name, codecs, externals)
        self._call.seen = []
        for packed in self._packed:
            _, tensor, version = packed.content
            content = self._call.pack(tensor)
            # A tensor that the block changed since stays: backward refuses it, as plain autograd does.
            if tensor._version == version:
                packed.content = content
        self._call.finish()
        return self._call.seen

    def discard(self) -> list[weakref.ref[Packed]]:
        """Let go of everything, the saved tensors too: there will be no backward.

        Returns for each slot a reference that is dead once autograd has let go of it.
        """
        for packed in self._packed:
            packed.content = (packed.content[0], None, None)
        references = [weakref.ref(packed) for packed in self._packed]
        self.close()
        return references

    def close(self) -> None:
        """Let go of everything but what the packed objects own."""
        self.recorder = None
        self._arguments = ((), {})
        self._parameters = {}
        self._packed = []

    def _external(self, value: int, source: Source) -> torch.Tensor:
        """What was at `source` when the call began: the block may have put something else there since."""
        return self._parameters[source.path[0]] if source.place == "parameter" else self.recorder.bases[value]

    def _was_changed_unseen(self, packed: Packed) -> bool:
        """Whether the block changed a saved tensor of its own where autograd does not see it, as through `.data`.

        Backward reads it as it is then, which is neither what was saved nor what a replay would make.
        """
        slot, tensor, version = packed.content
        return tensor._version == version and self.recorder.was_written_later(self.recorder.slots[slot])

    def _pack(self, tensor: torch.Tensor) -> Packed:
        packed = Packed(self.recorder.save(tensor), tensor)
        self._packed.append(packed)
        return packed

    def _unpack(self, packed: Packed) -> torch.Tensor:
        if self._call is not None:
            return self._call.unpack(packed.content)
        slot, tensor, version = packed.content
        if tensor._version != version:
            raise changed_in_place(self.name, f"saved tensor {slot}")
        return tensor
