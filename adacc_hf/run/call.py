"""One call of a block: under a plan, or recorded (rule R8).

NOTE [State of a call]
1. Autograd's packed object is `(slot, held, version, spec)`. It owns what this slot needs: the tensor itself, or the
   cells of the stored values that its replay reads. When autograd lets go of the slot, they go (rule R11): no table
   outside. `spec` makes a DTensor of what was recomputed; all else here are plain tensors, the parts of this rank.
2. The call owns what was recomputed in backward and a later unpack needs. The schedule says when each value was used
last.
3. Unpacks usually come in the order that the schedule was made for. If one does not (a second backward, gradients of a
   part of the graph), it is served by a program made for it alone, and nothing recomputed is dropped before the call
   ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from adacc_hf.artifacts.errors import OTHER_CLASSES, SavedOtherwiseError
from adacc_hf.kernels.codecs import Coder
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.recorder import CHANGED_UNSEEN, COMPILED, Recorder, RngUse, runs_compiled_code
from adacc_hf.tape.replay import ReplayProgram, view
from adacc_hf.tape.tape import Source
from adacc_hf.torch_glue.private import current_autograd_node, version_of
from adacc_hf.torch_glue.rng_state import generator_state
from adacc_hf.torch_glue.tensors import (
    PLAIN,
    arrived,
    copied,
    copy_with_storage,
    current_node,
    local_of,
    spec_of,
    whole,
)

PackedSlot = tuple[int, Any, "int | None", Any]

_NOTHING = ReplayProgram((), (), (), ())
"""What is run for a slot of which autograd gets back the very tensor."""


class Cell:
    """A stored value of one call: its base tensor, or its payload."""

    __slots__ = ("payload", "saved", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.payload: Any = None
        self.saved: torch.Tensor | None = None
        """What autograd saved. Its version tells of changes in place, which leave no mark on the part of a DTensor."""
        self.version = 0


class Call:
    """The state of one call of a block. `pack` and `unpack` are its saved-tensor hooks."""

    __slots__ = (
        "_cells",
        "_codecs",
        "_environment",
        "_in_order",
        "_rank",
        "_schedule",
        "_slot",
        "_versions",
        "block",
        "plan",
        "seen",
    )

    def __init__(
        self, plan: ExecutionPlan, block: str, codecs: Mapping[int, Coder], externals: list[tuple[int, torch.Tensor]]
    ) -> None:
        self.plan = plan
        self.block = block
        self.seen: list[int] | None = None
        """If a list, the order of unpacks is noted in it."""
        self._codecs = codecs
        self._cells: dict[int, Cell] = {value: Cell() for value in plan.roots}
        self._environment: list[torch.Tensor | None] = [None] * plan.num_values
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        for value, tensor in externals:
            local = tensor if type(tensor) in PLAIN else local_of(tensor)
            if value in self._cells:
                self._store(value, tensor, local)
            else:
                self._environment[value] = local
                self._versions[value] = tensor, version_of(tensor)
        if plan.first_state is not None:
            self._take_state(*plan.first_state)
        self._slot = 0
        self._schedule = plan.schedule
        self._rank = 0
        self._in_order = True

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`fn(*args)`, whose saved tensors this call takes."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            result = fn(*args)
        self.finish()
        return result

    def pack(self, tensor: torch.Tensor) -> PackedSlot:
        """Take the next tensor that autograd saves."""
        slot = self._slot
        self._slot = slot + 1
        if slot >= self.plan.num_slots:
            raise SavedOtherwiseError(self._describe(slot, tensor, "no such slot"))
        expected = self.plan.slots[slot]
        if type(tensor) in PLAIN:  # as nearly all are: thirty saved tensors in each block pass through here
            local = tensor
        else:
            tensor = arrived(tensor)
            local = local_of(tensor)
        ref = self.plan.tape.slots[slot]
        size, stride, offset = ref.geometry
        if (
            local.shape != size
            or local.dtype is not ref.dtype
            or local.stride() != stride
            or (expected.checks_offset and local.storage_offset() != offset)
        ):
            raise SavedOtherwiseError(self._describe(slot, local, f"{size} stride {stride} {ref.dtype}"))
        if expected.in_cell and not self.has(expected.value):
            self._store(expected.value, tensor, local)
        if expected.state_after is not None:
            self._take_state(*expected.state_after)
        if expected.needs is None:
            return slot, tensor.detach(), version_of(tensor), None
        cells = self._cells
        return slot, [cells[value] for value in expected.needs], None, None if local is tensor else spec_of(tensor)

    def finish(self) -> None:
        """End the forward: from now on only the packed objects own what is stored."""
        if self._slot != self.plan.num_slots:
            raise SavedOtherwiseError(
                f"block {self.block}: autograd saved {self._slot} tensors, its tape has {self.plan.num_slots}; its "
                f"operators vary at one shape: {OTHER_CLASSES}"
            )
        self._cells = {}

    def has(self, value: int) -> bool:
        """Whether the cell of `value`, which has one, is filled."""
        cell = self._cells[value]
        return cell.tensor is not None or cell.payload is not None

    def _take_state(self, value: int, device: torch.device) -> None:
        """Take the state that the generator of `device` is in, for replay to draw from; not that of a call that is
        over, whose record has it."""
        if not self.has(value):
            cell = self._cells[value]
            cell.tensor = cell.saved = generator_state(device)
            cell.version = version_of(cell.saved)

    def leave_tape(self, bases: Mapping[int, torch.Tensor]) -> None:
        """No more slots come that the tape has; replay of those that came may read all of `bases`, by value.

        They are copied: what changes them from now on is on no tape.
        """
        for value, base in bases.items():
            if not self.has(value):
                copy = copy_with_storage(base)
                self._store(value, copy, copy)
        self._cells = {}

    def unpack(self, packed: PackedSlot) -> torch.Tensor:
        """Give autograd the tensor of a slot, recomputed if need be."""
        slot, held, version, spec = packed
        if self.seen is not None:
            self.seen.append(slot)
        program = self._next_program(slot)
        if version is not None:
            if version_of(held) != version:
                raise self._modified(self.plan.slots[slot].value)
            return copied(held) if self.plan.slots[slot].is_read_by_replay and _may_be_overwritten() else held
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.plan.device_type):
            with torch.no_grad(), torch.autocast(self.plan.device_type, enabled=False):
                recomputed = self._run(program, slot, held)
        else:
            recomputed = self._run(program, slot, held)
        return recomputed if spec is None else whole(recomputed, spec)

    def _next_program(self, slot: int) -> ReplayProgram:
        schedule = self._schedule
        if self._in_order and schedule.order[self._rank] == slot:
            program = schedule.programs[self._rank]
            self._rank = (self._rank + 1) % len(schedule.order)
            return program
        self._in_order = False
        if self.plan.slots[slot].needs is None:
            return _NOTHING
        return self.plan.program_out_of_order(slot, self._environment)

    def _run(self, program: ReplayProgram, slot: int, cells: list[Cell]) -> torch.Tensor:
        environment = self._environment
        # No others: an optimizer may step inside backward, on weights that nothing needs any more.
        for value in program.reads:
            self._check_unchanged(value)
        for step in program.steps:
            for value in step.loads:
                self._fetch(value, slot, cells)
            step.run(environment)
        for value in program.loads:
            self._fetch(value, slot, cells)
        value, ref = self.plan.slots[slot].value, self.plan.tape.slots[slot]
        base = environment[value]
        assert base is not None  # the program has put it there
        result = base.as_strided(*ref.geometry) if base.dtype is ref.dtype else view(base, ref)
        for freed in program.frees:
            environment[freed] = None
        is_held = environment[value] is not None or value in self.plan.store.retained
        is_read_again = is_held and self.plan.slots[slot].is_read_by_replay
        return copy_with_storage(result) if is_read_again and _may_be_overwritten() else result

    def _fetch(self, value: int, slot: int, cells: list[Cell]) -> None:
        """Put a stored value into the environment, decoded unless it is still there."""
        cell = cells[self.plan.slots[slot].position[value]]
        if cell.tensor is not None:
            if version_of(cell.saved) != cell.version:
                raise self._modified(value)
            self._environment[value] = cell.tensor
        elif self._environment[value] is None:
            decoded, ref = self._codecs[value].decode(cell.payload), self.plan.tape.values[value].ref
            is_same = decoded.dtype is ref.dtype
            self._environment[value] = decoded.as_strided(*ref.geometry) if is_same else view(decoded, ref)

    def _store(self, value: int, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Fill the cell of `value` from a tensor on its storage, of which this rank has the part `local`; encoded once
        however many slots share it (rule R3)."""
        cell, is_coded = self._cells[value], value in self._codecs
        with torch.no_grad():
            if is_coded:
                ref = self.plan.encode_views[value]
            else:
                cell.saved, cell.version = tensor.detach(), version_of(tensor)
                local = cell.saved if local is tensor else local_of(cell.saved)
                ref = self.plan.tape.values[value].ref
            base = local.as_strided(*ref.geometry) if local.dtype is ref.dtype else view(local, ref)
            if is_coded:
                cell.payload = self._codecs[value].encode(base)
            else:
                cell.tensor = base

    def _check_unchanged(self, value: int) -> None:
        tensor, version = self._versions[value]
        if version_of(tensor) != version:
            raise RuntimeError(
                f"block {self.block}: {self.plan.tape.values[value].name}, which replay reads in backward, was changed "
                f"in place after the forward: change it after backward, or on a copy, or train without replay "
                f"(AdaccConfig(actions=('retain', 'compress')))"
            )

    def _modified(self, value: int) -> RuntimeError:
        return changed_in_place(self.block, self.plan.tape.values[value].name)

    def _describe(self, slot: int, tensor: torch.Tensor, expected: Any) -> str:
        return (
            f"block {self.block}: saved tensor {slot} is {tuple(tensor.shape)} stride {tensor.stride()} "
            f"{tensor.dtype}, its tape says {expected}; its operators vary at one shape: {OTHER_CLASSES}"
        )


def _may_be_overwritten() -> bool:
    """Whether what is being unpacked goes to an autograd function written in Python, or to nobody knows whom.

    Such a function's backward may write into what it saved (rule R6); torch's own never do.
    """
    node = current_autograd_node()  # torch's own, most often
    node = current_node() if node is None else node
    return node is None or isinstance(node, BackwardCFunction)


def changed_in_place(block: str, what: str) -> RuntimeError:
    """The error for a tensor that backward needs as it was."""
    return RuntimeError(
        f"block {block}: {what}, needed for backward, was changed in place after the forward; plain autograd refuses "
        f"this too: change it after backward, or on a copy"
    )


# One recorded call of a block: its tape, and what it saved until a plan takes over.


class RecordedSlot:
    """What autograd holds for one slot: the very tensor that it saved, and later what a plan stores for it."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.content: PackedSlot = (slot, tensor.detach(), version_of(tensor), None)


class Recording:
    """One recorded call of a block. Its saved tensors can be handed over to a compiled plan when it is over."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng_use: type[RngUse] = RngUse,
    ) -> None:
        self.name = name
        self.block = block
        self.recorder = Recorder(block, args, kwargs, rng_use)
        self._arguments = (args, kwargs)
        self._parameters = dict(block.named_parameters(remove_duplicate=False))
        self._packed: list[RecordedSlot] = []
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

    def hand_over(self, compiled: ExecutionPlan, codecs: Mapping[int, Coder]) -> list[int]:
        """Store what the plan stores and let go of the rest; returns the list that the order of unpacks goes into."""
        externals = [(value, self._external(value, source)) for value, source in compiled.externals]
        externals += [(v, self.recorder.bases[v]) for v in compiled.roots if compiled.tape.is_generator_state(v)]
        self._call = Call(compiled, self.name, codecs, externals)
        self._call.seen = []
        for packed in self._packed:
            _, tensor, version, _ = packed.content
            content = self._call.pack(tensor)
            # A tensor that the block changed since stays: backward refuses it, as plain autograd does.
            if version_of(tensor) == version:
                packed.content = content
        self._call.finish()
        return self._call.seen

    def discard(self) -> list[weakref.ref[RecordedSlot]]:
        """Let go of everything, the saved tensors too: there will be no backward.

        Returns for each slot a reference that is dead once autograd has let go of it.
        """
        for packed in self._packed:
            packed.content = (packed.content[0], None, None, None)
        references = [weakref.ref(packed) for packed in self._packed]
        self.close()
        return references

    def close(self) -> None:
        """Let go of everything but what the packed objects own."""
        del self.recorder
        self._arguments = ((), {})
        self._parameters = {}
        self._packed = []

    def _external(self, value: int, source: Source) -> torch.Tensor:
        """What was at `source` when the call began: the block may have put something else there since."""
        return self._parameters[source.path[0]] if source.place == "parameter" else self.recorder.bases[value]

    def _was_changed_unseen(self, packed: RecordedSlot) -> bool:
        """Whether the block changed a saved tensor of its own where autograd does not see it, as through `.data`.

        Backward reads it as it is then, which is neither what was saved nor what a replay would make.
        """
        slot, tensor, version, _ = packed.content
        return version_of(tensor) == version and self.recorder.was_written_later(self.recorder.slots[slot])

    def _pack(self, tensor: torch.Tensor) -> RecordedSlot:
        packed = RecordedSlot(self.recorder.save(tensor), tensor)
        self._packed.append(packed)
        return packed

    def _unpack(self, packed: RecordedSlot) -> torch.Tensor:
        if self._call is not None:
            return self._call.unpack(packed.content)
        slot, tensor, version, _ = packed.content
        if version_of(tensor) != version:
            raise changed_in_place(self.name, f"saved tensor {slot}")
        return tensor
