"""One call of a block under a plan: what saved-tensor hooks store in forward and give back in backward.

NOTE [State of a call]
1. Autograd's packed object is `(slot, held, version, spec)`. It owns what this slot needs: the tensor itself, or the
   cells of the stored values that its replay reads. When autograd lets go of the slot, they go (rule R11): no table
   outside. `spec` makes a DTensor of what was remade; all else here are plain tensors, the parts of this rank.
2. The call owns what was remade in backward and a later unpack needs. The schedule says when each value was used last.
3. Unpacks usually come in the order that the schedule was made for. If one does not (a second backward, gradients of a
   part of the graph), it is served by a program made for it alone, and nothing remade is dropped before the call ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from adacc_hf.errors import SavedOtherwiseError
from adacc_hf.execution.current_node import current_node
from adacc_hf.tapes.local_tensors import arrived, copied, is_plain, local_of, spec_of, whole
from adacc_hf.tapes.replay import Program, copy_with_storage, view

if TYPE_CHECKING:
    from adacc_hf.kernels.codecs import Codec
    from adacc_hf.tapes.compiled import CompiledPlan

Packed = tuple[int, Any, "int | None", Any]


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
        self, plan: CompiledPlan, block: str, codecs: dict[int, Codec], externals: list[tuple[int, torch.Tensor]]
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
            if value in self._cells:
                self._store(value, tensor)
            else:
                self._environment[value] = local_of(tensor)
                self._versions[value] = tensor, tensor._version
        self._slot = 0
        self._schedule = plan.schedule
        self._rank = 0
        self._in_order = True

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Take the next tensor that autograd saves."""
        slot = self._slot
        self._slot = slot + 1
        if slot >= self.plan.num_slots:
            raise SavedOtherwiseError(self._describe(slot, tensor, "no such slot"))
        expected = self.plan.slots[slot]
        if is_plain(tensor):  # as nearly all are: thirty saved tensors in each block pass through here
            local = tensor
        else:
            tensor = arrived(tensor)
            local = local_of(tensor)
        if (
            local.shape != expected.size
            or local.dtype is not expected.dtype
            or local.stride() != expected.stride
            or (expected.checks_offset and local.storage_offset() != expected.offset)
        ):
            raise SavedOtherwiseError(self._describe(slot, local, expected))
        if expected.in_cell and not self.has(expected.value):
            self._store(expected.value, tensor)
        if expected.needs is None:
            return slot, tensor.detach(), tensor._version, None
        cells = self._cells
        return slot, [cells[value] for value in expected.needs], None, None if local is tensor else spec_of(tensor)

    def finish(self) -> None:
        """End the forward: from now on only the packed objects own what is stored."""
        if self._slot != self.plan.num_slots:
            raise SavedOtherwiseError(
                f"block {self.block}: autograd saved {self._slot} tensors, its tape has {self.plan.num_slots}; its "
                f"operators vary at one shape: leave its class out with AdaccConfig(block_classes=...)"
            )
        self._cells = {}

    def has(self, value: int) -> bool:
        """Whether the cell of `value`, which has one, is filled."""
        cell = self._cells[value]
        return cell.tensor is not None or cell.payload is not None

    def leave_tape(self, bases: Mapping[int, torch.Tensor]) -> None:
        """No more slots come that the tape has; replay of those that came may read all of `bases`, by value.

        They are copied: what changes them from now on is on no tape.
        """
        for value, base in bases.items():
            if not self.has(value):
                self._store(value, copy_with_storage(base))
        self._cells = {}

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Give autograd the tensor of a slot, remade if need be."""
        slot, held, version, spec = packed
        if self.seen is not None:
            self.seen.append(slot)
        program = self._next_program(slot)
        if version is not None:
            if held._version != version:
                raise self._modified(self.plan.slots[slot].value)
            return copied(held) if self.plan.slots[slot].is_read_by_replay and _may_be_overwritten() else held
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.plan.device_type):
            with torch.no_grad(), torch.autocast(self.plan.device_type, enabled=False):
                return whole(self._run(program, slot, held), spec)
        return whole(self._run(program, slot, held), spec)

    def _next_program(self, slot: int) -> Program | None:
        schedule = self._schedule
        if self._in_order and schedule.order[self._rank] == slot:
            program = schedule.programs[self._rank]
            self._rank = (self._rank + 1) % len(schedule.order)
            return program
        self._in_order = False
        if self.plan.slots[slot].needs is None:
            return None
        return self.plan.program_out_of_order(slot, self._environment)

    def _run(self, program: Program, slot: int, cells: list[Cell]) -> torch.Tensor:
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
        ref = self.plan.slots[slot].ref
        result = view(environment[ref.value], ref)
        for value in program.frees:
            environment[value] = None
        is_held = environment[ref.value] is not None or ref.value in self.plan.store.retained
        is_read_again = is_held and self.plan.slots[slot].is_read_by_replay
        return copy_with_storage(result) if is_read_again and _may_be_overwritten() else result

    def _fetch(self, value: int, slot: int, cells: list[Cell]) -> None:
        """Put a stored value into the environment, decoded unless it is still there."""
        cell = cells[self.plan.slots[slot].position[value]]
        if cell.tensor is not None:
            if cell.saved._version != cell.version:
                raise self._modified(value)
            self._environment[value] = cell.tensor
        elif self._environment[value] is None:
            decoded = self._codecs[value].decode(cell.payload)
            self._environment[value] = view(decoded, self.plan.tape.values[value].ref)

    def _store(self, value: int, tensor: torch.Tensor) -> None:
        """Fill the cell of `value` from a tensor on its storage; encoded once however many slots share it (rule R3)."""
        cell = self._cells[value]
        with torch.no_grad():
            if value in self._codecs:
                cell.payload = self._codecs[value].encode(view(local_of(tensor), self.plan.encode_views[value]))
            else:
                cell.saved, cell.version = tensor.detach(), tensor._version
                cell.tensor = view(local_of(cell.saved), self.plan.tape.values[value].ref)

    def _check_unchanged(self, value: int) -> None:
        tensor, version = self._versions[value]
        if tensor._version != version:
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
            f"{tensor.dtype}, its tape says {expected}; its operators vary at one shape: leave its class out with "
            f"AdaccConfig(block_classes=...)"
        )


def _may_be_overwritten() -> bool:
    """Whether what is being unpacked goes to an autograd function written in Python, or to nobody knows whom.

    Such a function's backward may write into what it saved (rule R6); torch's own never do.
    """
    node = current_node()
    return node is None or isinstance(node, BackwardCFunction)


def changed_in_place(block: str, what: str) -> RuntimeError:
    """The error for a tensor that backward needs as it was."""
    return RuntimeError(
        f"block {block}: {what}, needed for backward, was changed in place after the forward; plain autograd refuses "
        f"this too: change it after backward, or on a copy"
    )
