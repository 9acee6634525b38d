"""One call of a block under its plan, recorded on the way (rule R8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adacc_hf.execution.call import Call, changed_in_place
from adacc_hf.kernels.codecs import Codec
from adacc_hf.tapes.checking import CheckingRecorder
from adacc_hf.tapes.compiled import CompiledPlan
from adacc_hf.tapes.tape import Tape


class Kept:
    """What autograd holds for a tensor that no plan knows: the tensor as it was, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version


class CheckedCall:
    """A call that takes what its plan says, and a record of it.

    Where it leaves the plan's tape, by another operator or another saved tensor, everything from there on is kept, and
    what was saved before is remade from what the tape says of it: the call is exact all the same.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: CompiledPlan,
        codecs: dict[int, Codec],
        externals: list[tuple[int, torch.Tensor]],
    ) -> None:
        self.name = name
        self._args = args
        self._call = Call(plan, name, codecs, externals)
        self._call.seen = []
        self._has_left = False
        self.recorder: CheckingRecorder | None = CheckingRecorder(
            block, args, kwargs, plan.tape, plan.roots, self._call.leave_tape
        )

    @property
    def seen(self) -> list[int] | None:
        """The list that the order of unpacks goes into; None if the call left the plan's tape."""
        return None if self._has_left else self._call.seen

    def run(self, fn: Callable[..., Any]) -> tuple[Any, Tape]:
        """(what the block returned, the record of the call)."""
        recorder = self.recorder
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with recorder.naming_modules(), recorder.watching_reads(), hooks, recorder:
            result = fn(*self._args)
        tape = recorder.finish()
        self._has_left = recorder.has_left
        if not recorder.has_left:
            self._call.finish()
        self.recorder, self._args = None, ()  # autograd holds this object, for the sake of `_unpack`
        return result, tape

    def _pack(self, tensor: torch.Tensor) -> Any:
        slot = self.recorder.save(tensor)
        if self.recorder.has_left:
            return Kept(tensor)
        with self.recorder.paused():
            packed = self._call.pack(tensor)
        self.recorder.let_go(self._call.plan.slots[slot].value)
        return packed

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Kept):
            return self._call.unpack(packed)
        if packed.tensor._version != packed.version:
            raise changed_in_place(self.name, "a saved tensor")
        return packed.tensor
