"""Execution plans: a policy's plan for a block, prepared to run on one tape (the record of a block's operators).

For each saved tensor, an execution plan lists the stored values, and the operators that are replayed when backward
unpacks the tensor. It also lists the parameters and other existing tensors that a call must provide for the replay. The
functions at the end of this file adapt a plan's choices to a tape with different operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from adacc_hf.artifacts.exact_recompute_rules import is_statistic, source_activations
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, Choice
from adacc_hf.kernels.codecs import MASK, Codec, codecs_suiting, get_codec, list_codecs
from adacc_hf.tape.inputs import PLACES, find_external
from adacc_hf.tape.replay import Environment, ReplayProgram, StorageMap, closure, schedule, single_program
from adacc_hf.tape.replay_check import merge_equal_values
from adacc_hf.tape.tape import Source, Tape, TensorRef, geometry_of
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import PLAIN, local_of


@dataclass(slots=True)
class Slot:
    """Instructions for one tensor that autograd saves, under a plan, at all sizes."""

    value: int
    """Index of the value that the saved tensor views. A value is one storage at one version."""
    in_cell: bool
    """True if the call stores the value in a cell, which all saved tensors of the value share (run/call.py)."""
    needs: tuple[int, ...] | None
    """Stored values from which the saved tensor is recomputed or decoded. None if autograd keeps it itself."""
    checks_offset: bool
    """True if the saved tensor's storage offset must be the recorded one. An argument may be a slice of any tensor."""
    is_partitioned: bool
    """True if the saved tensor is a parameter that ZeRO 3 divides among ranks, or a view of one."""
    is_read_by_replay: bool
    """True if replay reads the value, or if saved tensors of other values with the same bits use it. A backward
    function that may write into the value then gets a copy."""
    state_after: tuple[int, torch.device] | None = None
    """(value, device) of the generator's state that the call captures after packing this saved tensor, or None."""
    position: dict[int, int] = field(init=False)
    """Index in `needs` of each value in `needs`."""

    def __post_init__(self) -> None:
        self.position = {value: index for index, value in enumerate(self.needs or ())}


class Schedule(NamedTuple):
    """Replay programs for one order of unpacks. Immutable, because a backward in progress relies on it."""

    order: tuple[int, ...]
    programs: list[ReplayProgram]


class ExecutionPlan:
    """A plan prepared to run on one tape, shared by all calls and blocks whose tapes have equal digests.

    `choices` contains one choice (retain, compress or recompute) for each activation. `shared` are inputs that code
    outside the block keeps alive. `is_partitioned` is True if ZeRO 3 divides the model's parameters among ranks. If the
    plan does not store a value that has the same contents as a stored value (`Tape.equal`), backward reads the stored
    value in its place.
    """

    def __init__(
        self, tape: Tape, choices: dict[int, Choice], shared: Iterable[int] = (), is_partitioned: bool = False
    ) -> None:
        self.tape = tape
        self.is_partitioned = is_partitioned
        self.num_values = len(tape.values)
        self.num_slots = len(tape.slots)
        self.device_type = next((value.device.type for value in tape.values), "cpu")
        self.is_plain = all(choice.action is Action.RETAIN for choice in choices.values())
        self.store = _storage_map(tape, choices, frozenset(shared))
        equal = _equal_values_used(tape, choices)
        self._merged_tape = merge_equal_values(tape, equal) if equal else tape
        """Copy of the tape that refers to a stored value in place of each value of equal contents that the plan does
        not store."""
        in_cells = {*equal.values(), *(v for v, choice in choices.items() if choice.action is not Action.RETAIN)}
        saved_values = [value for value in self._merged_tape.saved_values() if value in in_cells]
        closures = {value: closure(self._merged_tape, value, self.store.__contains__) for value in saved_values}
        stored = self.store.retained | self.store.compressed
        self.needs = {v: tuple(leaf for leaf in leaves if leaf in stored) for v, (_, leaves) in closures.items()}
        """Stored values from which each saved value in a cell is recomputed, if nothing else was recomputed before."""
        saved = {value for value in self.needs if value in self.store.compressed}
        self.roots = tuple(sorted(saved.union(*self.needs.values())))
        """Values that a call itself stores for backward, each in a cell: values that the plan compresses, or that a
        replay reads."""
        replayed = {operator for operators, _ in closures.values() for operator in operators}
        read = {value for operator in replayed for value in self._merged_tape.operators[operator].inputs()}
        read = {value for value in read if not tape.is_held_elsewhere(value)} | {*equal.values()}
        self.slots = [self._slot(ref.value, read) for ref in self._merged_tape.slots]
        self.first_state: tuple[int, torch.device] | None = None
        """(value, device) of the random generator's state that a call captures before the block runs, or None."""
        self.draws = False
        """True if replay draws random numbers again."""
        self._place_states()
        self.encode_views = {value: encode_view(tape, value) for value in self.store.compressed}
        self.externals = self._externals({leaf for _, leaves in closures.values() for leaf in leaves})
        """(value, source) of the inputs, parameters, buffers and attached tensors that a call provides for replay."""
        self.attached = [place for place, (_, source) in enumerate(self.externals) if source.place in PLACES]
        """Indices in `externals` of attached tensors (tape/inputs.py). Most blocks have none."""
        self._layouts = self._expected_layouts()
        looked_up = {value for value, _ in self.externals}
        self._sharing = [each for each in tape.sharing if each[0] in looked_up]
        self._passthrough = frozenset(slot.value for slot in self.slots if slot.needs is None)
        self.follow(tape.order or tuple(reversed(range(self.num_slots))))

    def follow(self, order: tuple[int, ...]) -> None:
        """Schedule replay for a backward that unpacks in `order`. Calls in progress keep their schedule."""
        self.schedule = Schedule(order, schedule(self._merged_tape, self.store, order, self._passthrough))

    def fetch(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[int, torch.Tensor]] | None:
        """Return (value, tensor) for each of `self.externals` in this call of `block`.

        Return None if one of the block's own tensors does not exist, or has another layout than recorded on the tape.
        The layout of arguments is part of the call's key.
        """
        externals = [(value, find_external(source, block, args, kwargs)) for value, source in self.externals]
        for place, size, stride, offset, dtype, device in self._layouts:
            tensor = externals[place][1]
            if tensor is None:
                return None
            if type(tensor) not in PLAIN:
                tensor = local_of(tensor)
            if (
                tensor.storage_offset() != offset
                or tensor.shape != size
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or tensor.device != device
            ):
                return None
        if self._sharing and not self._is_shared(block, args, kwargs):
            return None
        return cast("list[tuple[int, torch.Tensor]]", externals)  # `find_external` finds every argument

    def _is_shared(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if tensors that shared a storage in the recorded call share one, with their recorded layouts."""
        for value, source, geometry in self._sharing:
            first = find_external(self._source_of(value), block, args, kwargs)
            other = find_external(source, block, args, kwargs)
            if first is None or other is None:
                return False
            first, other = local_of(first), local_of(other)
            is_same = storage_key(first.untyped_storage()) == storage_key(other.untyped_storage())
            if not is_same or geometry_of(other) != geometry:
                return False
        return True

    def _expected_layouts(self) -> list[tuple[int, Any, Any, int, torch.dtype, torch.device]]:
        """Return (index in `externals`, recorded layout) of each tensor in `externals` that is no argument."""
        layouts = []
        for place, (value, source) in enumerate(self.externals):
            if source.place != "argument":
                recorded = self.tape.values[value]
                layouts.append((place, *recorded.ref.geometry, recorded.ref.dtype, recorded.device))
        return layouts

    def replaced_source(self, before: list[tuple[int, torch.Tensor]], block: nn.Module) -> Source | None:
        """Return the place of an attached tensor (such as "module attn.rotary") that the call has replaced by another,
        or None. `before` contains the existing tensors that replay reads, at the beginning of the call."""
        for place in self.attached:
            _, source = self.externals[place]
            current = find_external(source, block, (), {})
            if current is None or storage_key(current.untyped_storage()) != storage_key(
                before[place][1].untyped_storage()
            ):
                return source
        return None

    def program_out_of_order(self, slot: int, environment: Environment) -> ReplayProgram:
        """Return the program that unpacks `slot` now, out of the scheduled order, from `environment`."""
        available = {value for value, tensor in enumerate(environment) if tensor is not None}
        return single_program(self._merged_tape, self.store, slot, available)

    def _slot(self, value: int, read: set[int]) -> Slot:
        """Return the plan's instructions for a saved tensor that views `value`. Values in `read` must not change before
        backward, because replay reads them, or backward does in place of equal values."""
        tape_value = self.tape.values[value]
        return Slot(
            value=value,
            in_cell=value in self.roots,
            needs=self.needs.get(value),
            checks_offset=tape_value.source is None,
            is_partitioned=self.is_partitioned and tape_value.place == "parameter",
            is_read_by_replay=value in read,
        )

    def _place_states(self) -> None:
        """Determine the saved tensors after which a call captures the generator's state, from which replay draws the
        same numbers again (rule R5). A state before all of them is captured when the call begins."""
        for num_saved, value, device in self.tape.generator_states():
            if value in self.roots:
                self.draws = True
                if num_saved:
                    self.slots[num_saved - 1].state_after = value, device
                else:
                    self.first_state = value, device

    def _externals(self, values_read: set[int]) -> list[tuple[int, Source]]:
        """Return (value, source) of each input, parameter or other existing tensor in `values_read` by replay."""
        saved = set(self._merged_tape.saved_values())
        required = [
            v for v in sorted(values_read) if v in self.store.persistent or (v in self.roots and v not in saved)
        ]
        return [(value, self._source_of(value)) for value in required if not self.tape.is_generator_state(value)]

    def _source_of(self, value: int) -> Source:
        source = self.tape.values[value].source
        assert source is not None  # no operator of the block makes an external
        return source


def _storage_map(tape: Tape, choices: dict[int, Choice], shared: frozenset[int]) -> StorageMap:
    """Return the values of `tape` that replay can read without recomputing them, grouped by how they are stored."""
    state = {value.index for value in tape.values if tape.is_module_state(value.index)}
    compressed = {value for value, choice in choices.items() if choice.action is Action.COMPRESS}
    retained = {value for value, choice in choices.items() if choice.action is Action.RETAIN}
    retained = {value for value in retained if not tape.values[value].overwritten}
    retained |= {value for _, value, _ in tape.generator_states()}
    return StorageMap(frozenset(state | shared), frozenset(retained), frozenset(compressed))


def _equal_values_used(tape: Tape, choices: dict[int, Choice]) -> dict[int, int]:
    """Return {value: stored value of equal contents} for the values that the plan does not store."""
    if all(choice != RECOMPUTE for choice in choices.values()):
        return {}
    saved = set(tape.saved_values())
    not_stored = {value for value in tape.equal if value not in saved or choices.get(value) == RECOMPUTE}
    return {value: tape.equal[value] for value in sorted(not_stored) if tape.equal[value] in choices}


def encode_view(tape: Tape, value: int) -> TensorRef:
    """Return a view of a value's whole tensor with dimensions in memory order: a codec reads one dense range."""
    ref = tape.values[value].ref
    size, stride, offset = ref.geometry
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    return TensorRef(value, (tuple(size[d] for d in order), tuple(stride[d] for d in order), offset), ref.dtype)


# Adapting a plan's choices to a tape that they were not made for.


def can_follow(choice: Choice, tape: Tape, value: int) -> bool:
    """Return True if replay can recompute `value` exactly, or the codec can encode it, as `choice` requires."""
    if choice.action is Action.RECOMPUTE:
        return value in tape.recomputable
    if choice.action is Action.COMPRESS:
        record, codec = tape.values[value], codec_of(choice)
        return record.is_encodable and codec.supports(record.ref.geometry[0], record.ref.dtype)
    return True


def choices_by_value(choices: Mapping[int, Choice], tape: Tape, same: Mapping[int, int]) -> dict[int, Choice]:
    """Transfer a plan's `choices` to `tape`, which saves other tensors than the tape that the plan was made for.

    `same` maps the values of the planned tape to values of `tape`. Values of `tape` that match no planned value get the
    lossless choice with the least memory.
    """
    planned = {same[value]: choice for value, choice in choices.items() if value in same}
    shared = {value for value in same.values() if tape.is_block_input(value)} - planned.keys()
    fitted = {value: choice for value, choice in least_memory_choices(tape).items() if value not in shared}
    for value in fitted.keys() & planned.keys():
        if can_follow(planned[value], tape, value):
            fitted[value] = planned[value]
    return fitted | dict.fromkeys(unfit_values(fitted, tape), RETAIN)


def unfit_values(choices: Mapping[int, Choice], tape: Tape) -> list[int]:
    """Return the values whose choice is impossible on `tape` (`can_follow`), or would recompute a statistic from values
    that are stored lossily (rule R14)."""
    lossy_values = {v for v, c in choices.items() if c.action is Action.COMPRESS and not codec_of(c).lossless}

    def is_unfit(value: int, choice: Choice) -> bool:
        if not can_follow(choice, tape, value):
            return True
        if choice != RECOMPUTE or not lossy_values:
            return False
        return _is_statistic_of(lossy_values, value, choices, tape)

    return [value for value, choice in choices.items() if is_unfit(value, choice)]


def _reads(tape: Tape, value: int) -> tuple[int, ...]:
    producer = tape.values[value].producer
    return () if producer is None else tape.operators[producer].inputs()


def _is_statistic_of(lossy_values: Collection[int], value: int, choices: Collection[int], tape: Tape) -> bool:
    """Return True if `value`, one number per row, would be computed from a value in `lossy_values`."""
    if not is_statistic(tape.values[value].ref.geometry[0]):
        return False
    return not source_activations(value, lambda v: _reads(tape, v), choices.__contains__).isdisjoint(lossy_values)


def codec_of(choice: Choice) -> Codec:
    """Return the codec of a COMPRESS choice. Raise ValueError if the choice names no codec or an unknown one."""
    if choice.codec is None:
        raise ValueError(f"codec=None in the choice {choice}: choose one of {', '.join(list_codecs())}")
    return get_codec(choice.codec, **dict(choice.options))


def least_memory_choices(tape: Tape) -> dict[int, Choice]:
    """Return, for each activation and block input of a tape, the lossless choice that stores the fewest bytes."""
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    saved_values = [value for value in tape.saved_values() if tape.values[value].source is None]
    return dict.fromkeys(inputs, RETAIN) | {value: least_memory(tape, value) for value in saved_values}


def least_memory(tape: Tape, value: int) -> Choice:
    """Return the lossless choice that stores the fewest bytes for a value that the block computed."""
    tape_value = tape.values[value]
    if value in tape.recomputable:
        return RECOMPUTE
    is_mask = tape_value.is_encodable and (tape_value.ref.dtype is torch.bool or _is_drawn_mask(tape, value))
    codecs = map(get_codec, codecs_suiting(MASK) if is_mask else ())
    size, dtype = tape_value.ref.geometry[0], tape_value.ref.dtype
    supported_codecs = [codec for codec in codecs if codec.supports(size, dtype)]
    smallest = min(supported_codecs, key=lambda codec: codec.predicted_bytes(size, dtype), default=None)
    return RETAIN if smallest is None else Choice(action=Action.COMPRESS, codec=smallest.name)


def _is_drawn_mask(tape: Tape, value: int) -> bool:
    """Return True for a mask of random zeros and ones, optionally scaled by a constant, as dropout on a CPU makes."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return operator.short_name == "bernoulli"
    # The divisor must be positive: -0.0 in a mask would be a third bit pattern.
    is_scaled = operator.short_name == "div" and len(operator.args) == 2 and isinstance(operator.args[1], (int, float))
    return is_scaled and operator.args[1] > 0 and _is_drawn_mask(tape, operator.inputs()[0])
