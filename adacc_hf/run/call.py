"""State of one call of a block: a call under a plan (`Call`), or a recorded call (`Recording`).

NOTE [State of a call]
1. Autograd's packed object is `(slot, content, version, spec)`. The packed object owns everything that the slot needs:
   the saved tensor itself, or the cells of the stored values that replay reads for this slot. When autograd frees the
   packed object, the tensor and the cells are freed too, because all state of a call is in its packed objects and in
   the call itself (rule R11). `spec` converts the recomputed tensor to a DTensor. All other tensors here are plain
   tensors, the local parts of this rank. A parameter that ZeRO 3 divides among ranks is a `PartitionedView`, which does
   not keep the gathered memory alive.
2. The call owns the values that backward recomputed and a later unpack needs. The schedule contains each value's last
   use.
3. Unpacks usually come in the order of the schedule. For an unpack out of order (a second backward, gradients of a part
   of the graph), a separate program runs, and recomputed values are freed only when the call ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from adacc_hf.artifacts.errors import BLOCK_CLASSES_HINT, SavedTensorMismatchError, TapeMismatchError
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.operator_effects import CHANGED_UNSEEN, COMPILED, RngUse, runs_compiled_code
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.replay import ReplayProgram, view
from adacc_hf.torch_glue.private import outer_hooks, version_of
from adacc_hf.torch_glue.rng_state import generator_state
from adacc_hf.torch_glue.second_run import checkpoint_call, checksum, report_other_bits
from adacc_hf.torch_glue.tensors import (
    PLAIN,
    Checksum,
    clone_with_storage,
    copy_with_storage,
    current_node,
    is_fake,
    kept_by_autograd,
    local_of,
    spec_of,
    to_dtensor,
    wait_if_async,
)
from adacc_hf.torch_glue.zero3 import saved_tensor, without_gathered_memory

PackedSlot = tuple[int, Any, "int | None", Any]

_NOTHING = ReplayProgram((), (), (), ())
"""Empty replay program, for slots (saved tensors) that autograd itself keeps."""


class Cell:
    """Container for one stored value in one call, until backward: a tensor on the value's storage, or a payload."""

    __slots__ = ("payload", "saved", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.payload: Any = None
        self.saved: torch.Tensor | None = None
        """The tensor that autograd saved. The tensor's version counts changes in place. For a DTensor, the cell's
        `tensor` is the local part, whose version does not count these changes."""
        self.version = 0


class Call:
    """State of one call of a block under a plan, with the saved-tensor hooks `pack` and `unpack`.

    `externals` contains (value index, tensor) for each tensor that replay reads and that existed before the call.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        block: str,
        codecs: Mapping[int, Coder],
        externals: list[tuple[int, torch.Tensor]],
        checked: Mapping[int, Codec] | None = None,
    ) -> None:
        """Initialize. If `checked` is given, the codecs of compressed values, backward compares checksums of the saved
        tensors that it recomputes without values stored with loss."""
        self._lossy = None if checked is None else {v for v, codec in checked.items() if not codec.lossless}
        self._checksums: dict[int, Checksum] = {}
        """Checksums of saved tensors that backward must recompute bit for bit, by slot."""
        self.plan = plan
        self.block = block
        self.unpacked_slots: list[int] | None = None
        """List to which backward appends each slot that it unpacks. None if their order is known."""
        self._codecs = codecs
        self._cells: dict[int, Cell] = {value: Cell() for value in plan.roots}
        self._environment: list[torch.Tensor | None] = [None] * plan.num_values
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        for value, tensor in externals:
            local = tensor if type(tensor) in PLAIN else local_of(tensor)
            if value in self._cells:
                self._store(value, tensor, local)
            else:
                # An alias keeps the memory of the forward, even if `parameter.data = ...` replaces it before backward.
                is_alias_needed = type(local) is nn.Parameter and not plan.is_partitioned
                self._environment[value] = local.detach() if is_alias_needed else local
                self._versions[value] = tensor, version_of(tensor)
        if plan.first_state is not None:
            self._store_state(*plan.first_state)
        self._slot = 0
        self._schedule = plan.schedule
        self._rank = 0
        self._in_order = True

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block's forward and return `fn(*args)`. Saved tensors are kept, compressed or dropped by the plan."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            result = fn(*args)
        self.finish()
        return result

    def pack(self, tensor: torch.Tensor) -> PackedSlot:
        """Saved-tensor hook: return the object to store for the next saved tensor.

        Raise SavedTensorMismatchError if the tensor differs from the next saved tensor on the tape.
        """
        slot = self._slot
        self._slot = slot + 1
        if slot >= self.plan.num_slots:
            raise SavedTensorMismatchError(self._describe(slot, tensor, "no slot of this number"))
        expected = self.plan.slots[slot]
        if type(tensor) in PLAIN:  # the fast path: about thirty saved tensors per block
            local = tensor
        else:
            tensor = wait_if_async(tensor)
            local = local_of(tensor)
        ref = self.plan.tape.slots[slot]
        size, stride, offset = ref.geometry
        if (
            local.shape != size
            or local.dtype is not ref.dtype
            or local.stride() != stride
            or (expected.checks_offset and local.storage_offset() != offset)
        ):
            raise SavedTensorMismatchError(self._describe(slot, local, f"{size} stride {stride} {ref.dtype}"))
        if expected.in_cell and not self.has(expected.value):
            self._store(expected.value, tensor, local)
        if expected.state_after is not None:
            self._store_state(*expected.state_after)
        if self._lossy is not None and expected.needs is not None and self._lossy.isdisjoint(expected.needs):
            self._checksums[slot] = checksum(local)
        if expected.needs is None:
            content = without_gathered_memory(tensor) if expected.is_partitioned else kept_by_autograd(tensor)
            return slot, content, version_of(tensor), None
        cells = self._cells
        return slot, [cells[value] for value in expected.needs], None, None if local is tensor else spec_of(tensor)

    def finish(self) -> None:
        """End the forward: from now on, only the packed objects own the stored values.

        Raise SavedTensorMismatchError if autograd saved fewer tensors than the tape lists.
        """
        if self._slot != self.plan.num_slots:
            raise SavedTensorMismatchError(
                f"block {self.block}: autograd saved {self._slot} tensors, but the tape has {self.plan.num_slots}; the "
                f"block's operators vary at one shape: {BLOCK_CLASSES_HINT}"
            )
        self._cells = {}

    def reschedule(self) -> None:
        """Use the plan's latest schedule. Call this before backward."""
        self._schedule = self.plan.schedule

    def has(self, value: int) -> bool:
        """Return True if this call has already stored `value` in its cell."""
        cell = self._cells[value]
        return cell.tensor is not None or cell.payload is not None

    def _store_state(self, value: int, device: torch.device) -> None:
        """Store the default generator's state for replay, unless a recording of this call has stored it."""
        if not self.has(value):
            cell = self._cells[value]
            cell.tensor = cell.saved = generator_state(device)
            cell.version = version_of(cell.saved)

    def unpack(self, packed: PackedSlot) -> torch.Tensor:
        """Saved-tensor hook for backward: return the saved tensor, decoded or recomputed if necessary.

        Raise RuntimeError if a stored tensor was changed in place since it was saved.
        """
        slot, content, version, spec = packed
        if self.unpacked_slots is not None:
            self.unpacked_slots.append(slot)
        program = self._next_program(slot)
        if version is not None:
            if version_of(content) != version:
                raise self._modified(self.plan.slots[slot].value)
            instructions = self.plan.slots[slot]
            if instructions.is_partitioned:
                content = saved_tensor(content)
            return clone_with_storage(content) if instructions.is_read_by_replay and _may_be_overwritten() else content
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.plan.device_type):
            with torch.no_grad(), torch.autocast(self.plan.device_type, enabled=False):
                recomputed = self._run(program, slot, content)
        else:
            recomputed = self._run(program, slot, content)
        if slot in self._checksums:
            self._compare(slot, recomputed)
        return recomputed if spec is None else to_dtensor(recomputed, spec)

    def _compare(self, slot: int, recomputed: torch.Tensor) -> None:
        """Raise TapeMismatchError if replay gives other bits than the forward (`report_other_bits`: on a GPU, warn)."""
        if bool(checksum(recomputed) == self._checksums.pop(slot)):
            return
        name = self.plan.tape.values[self.plan.slots[slot].value].name
        error = TapeMismatchError(
            f"block {self.block}: replay recomputes saved tensor {slot} ({name}) with other bits than the forward, so "
            f"gradients would be wrong. The block reads something that changed unnoticed since it was recorded, or an "
            f"operator gives other bits each time: train with AdaccConfig(actions=('retain', 'compress')); or, "
            f"{BLOCK_CLASSES_HINT}"
        )
        report_other_bits(error, self.plan.device_type == "cuda")

    def _next_program(self, slot: int) -> ReplayProgram:
        """Return the replay program of the saved tensor `slot`. Backward may unpack in another order than expected."""
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
        """Run a replay program, which reads stored values from `cells`, and return the saved tensor."""
        environment = self._environment
        # Check only the tensors of this program: an optimizer may step inside backward, on weights that are no longer
        # needed.
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
        assert base is not None  # the program computed it
        result = view(base, ref)
        for freed_value in program.frees:
            environment[freed_value] = None
        is_held = environment[value] is not None or value in self.plan.store.retained
        is_read_again = is_held and self.plan.slots[slot].is_read_by_replay
        return copy_with_storage(result) if is_read_again and _may_be_overwritten() else result

    def _fetch(self, value: int, slot: int, cells: list[Cell]) -> None:
        """Put a stored value into the environment of replay, decoded unless the decoded tensor still exists."""
        cell = cells[self.plan.slots[slot].position[value]]
        if cell.tensor is not None:
            if version_of(cell.saved) != cell.version:
                raise self._modified(value)
            self._environment[value] = cell.tensor
        elif self._environment[value] is None:
            decoded = self._codecs[value].decode(cell.payload)
            self._environment[value] = view(decoded, self.plan.tape.values[value].ref)

    def _store(self, value: int, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Store `value` in its cell, as a tensor or a payload. `local` is this rank's part of `tensor`. A value is
        encoded once, even if several saved tensors view it (rule R3)."""
        cell, is_coded = self._cells[value], value in self._codecs
        with torch.no_grad():
            if is_coded:
                ref = self.plan.encode_views[value]
            else:
                cell.saved, cell.version = tensor.detach(), version_of(tensor)
                local = cell.saved if local is tensor else local_of(cell.saved)
                ref = self.plan.tape.values[value].ref
            base = view(local, ref)
            if is_coded:
                cell.payload = self._codecs[value].encode(base)
            else:
                cell.tensor = base

    def _check_unchanged(self, value: int) -> None:
        tensor, version = self._versions[value]
        if version_of(tensor) != version:
            raise RuntimeError(
                f"block {self.block}: {self.plan.tape.values[value].name}, which replay reads in backward, was changed "
                f"in place after the forward: change it after backward, change a copy, or train without replay "
                f"(AdaccConfig(actions=('retain', 'compress')))"
            )

    def _modified(self, value: int) -> RuntimeError:
        return changed_in_place(self.block, self.plan.tape.values[value].name)

    def _describe(self, slot: int, tensor: torch.Tensor, expected: Any) -> str:
        return (
            f"block {self.block}: saved tensor {slot} is {tuple(tensor.shape)} stride {tensor.stride()} "
            f"{tensor.dtype}, but the tape has {expected}; the block's operators vary at one shape: "
            f"{BLOCK_CLASSES_HINT}"
        )


def _may_be_overwritten() -> bool:
    """Return True if the running backward is written in Python or unknown, and so may write (rule R6)."""
    node = current_node()
    return node is None or isinstance(node, BackwardCFunction)


def changed_in_place(block: str, tensor_name: str) -> RuntimeError:
    """Return the error to raise if a saved tensor of `block` was changed in place before backward."""
    return RuntimeError(
        f"block {block}: {tensor_name}, needed for backward, was changed in place after the forward; plain autograd "
        f"refuses this too: change it after backward, or change a copy"
    )


# One recorded call of a block: its tape, and its saved tensors until a plan takes over.


class RecordedSlot:
    """Object that autograd stores instead of one saved tensor of a recorded call.

    `content` is the tensor itself, and after `Recording.hand_over` the stored form that the plan chooses.
    `checkpointed` is what torch's checkpoint stores of the tensor, or None without it.
    """

    __slots__ = ("__weakref__", "checkpointed", "content")

    def __init__(self, slot: int, tensor: torch.Tensor, checkpointed: Any = None) -> None:
        self.content: PackedSlot = (slot, without_gathered_memory(tensor), version_of(tensor), None)
        self.checkpointed = checkpointed


class Recording:
    """A call of a block while its tape is recorded. Then `hand_over` or `discard` frees its saved tensors."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng_use: type[RngUse] = RngUse,
        keeps_results: bool = False,
    ) -> None:
        self.name = name
        self.block = block
        self.recorder = Recorder(block, args, kwargs, rng_use, keeps_results)
        self._arguments = (args, kwargs)
        self._parameters = dict(block.named_parameters(remove_duplicate=False))
        self._packed: list[RecordedSlot] = []
        self._call: Call | None = None
        self._checkpoint: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        """The saved-tensor hooks of torch's checkpoint, if the call runs under it."""

    def run_checkpointed(self, fn: Callable[..., Any]) -> Any:
        """Run and record a block's call under torch's checkpoint, and return its result.

        Until `discard`, the saved tensors stay stored. Then backward runs the call again, so do not call `discard` if
        the block must not run twice (`changes_in_place`).
        """
        has_run = False

        def run(*args: Any) -> Any:
            nonlocal has_run
            if has_run:
                return fn(*args)
            has_run = True
            self._checkpoint = outer_hooks()
            return self.run(fn)

        return checkpoint_call(self.block, run, *self._arguments[0], is_held=True)

    def run(self, fn: Callable[..., Any]) -> Any:
        """Run and record a block's call under the plan, and return its result."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with self.recorder.naming_modules(), self.recorder.watching_reads(), hooks, self.recorder:
            result = fn(*self._arguments[0])
        if runs_compiled_code(result, self._arguments):
            self.recorder.untrusted = COMPILED
        elif any(map(self._has_hidden_change, self._packed)):
            self.recorder.untrusted = self.recorder.untrusted or CHANGED_UNSEEN
        return result

    def hand_over(self, plan: ExecutionPlan, codecs: Mapping[int, Coder], checked: Mapping[int, Codec]) -> list[int]:
        """Apply `plan` to the recorded call, which is checked: keep, encode or free each saved tensor. Return a list to
        which backward will append each saved tensor that it unpacks."""
        # The call may have put another parameter at its source.
        externals = [
            (value, self._parameters[source.path[0]] if source.place == "parameter" else self.recorder.bases[value])
            for value, source in plan.externals
        ]
        externals += [(v, self.recorder.bases[v]) for v in plan.roots if plan.tape.is_generator_state(v)]
        self._call = Call(plan, self.name, codecs, externals, None if is_fake(self.recorder.bases[0]) else checked)
        self._call.unpacked_slots = []
        for packed in self._packed:
            _, tensor, version, _ = packed.content
            content = self._call.pack(saved_tensor(tensor))
            # Keep a tensor that the block has changed since: backward refuses it, as plain autograd does.
            if version_of(tensor) == version:
                packed.content = content
        self._call.finish()
        return self._call.unpacked_slots

    def discard(self) -> None:
        """Free the saved tensors of a call that has no backward, or whose backward runs the call again."""
        for packed in self._packed:
            packed.content = (packed.content[0], None, None, None)

    def references(self) -> list[weakref.ref[RecordedSlot]]:
        """Return one weak reference per saved tensor, which is dead as soon as autograd has freed this tensor."""
        return [weakref.ref(packed) for packed in self._packed]

    def reschedule(self) -> None:
        """Follow the order of unpacks that the plan has learned since `hand_over`. Call this before backward."""
        if self._call is not None:
            self._call.reschedule()

    def close(self) -> None:
        """Free the recorder and the arguments. Only what autograd holds then keeps saved tensors alive."""
        del self.recorder
        self._arguments = ((), {})
        self._parameters = {}
        self._packed = []

    def _has_hidden_change(self, packed: RecordedSlot) -> bool:
        """Return True if the block changed a saved tensor of its own through `.data`, which replay cannot reproduce."""
        slot, tensor, version, _ = packed.content
        return version_of(tensor) == version and self.recorder.was_written_later(self.recorder.slots[slot])

    def _pack(self, tensor: torch.Tensor) -> RecordedSlot:
        checkpointed = None if self._checkpoint is None else self._checkpoint[0](tensor)
        packed = RecordedSlot(self.recorder.save(tensor), tensor, checkpointed)
        self._packed.append(packed)
        return packed

    def _unpack(self, packed: RecordedSlot) -> torch.Tensor:
        if self._call is not None:
            return self._call.unpack(packed.content)
        slot, tensor, version, _ = packed.content
        if tensor is None and self._checkpoint is not None:
            return self._checkpoint[1](packed.checkpointed)
        if version_of(tensor) != version:
            raise changed_in_place(self.name, f"saved tensor {slot}")
        return saved_tensor(tensor)
