"""Compiled plans: a plan made ready to run on one tape.

It holds what each slot keeps, what each unpack replays, and what a call has to hold for that. The end of the file fits
a plan's choices to a tape that they may not have been made for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import nn

from adacc_hf.artifacts.exact_recompute_rules import index_values, is_index, is_statistic, made_from
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, Choice
from adacc_hf.kernels.codecs import MASK, Codec, codecs_suiting, get_codec, list_codecs
from adacc_hf.tape.inputs import PLACES, find_external
from adacc_hf.tape.replay import Environment, ReplayProgram, StorageMap, closure, schedule, single_program
from adacc_hf.tape.replay_check import merged, substituted
from adacc_hf.tape.tape import Source, Tape, TapeOperator, TensorRef, geometry_of
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import PLAIN, local_of


@dataclass(slots=True)
class Slot:
    """Treatment of one saved tensor under a plan. It holds at all sizes; the size itself is in `Tape.slots`."""

    value: int
    """The value that the tensor views."""
    in_cell: bool
    """Whether the value is stored in a cell, which its first slot fills."""
    needs: tuple[int, ...] | None
    """Stored values that recomputing the slot reads. None: autograd gets the saved tensor itself back."""
    checks_offset: bool
    """Whether the storage offset has to be the tape's. An argument may be a slice of any tensor."""
    is_read_by_replay: bool
    """Whether replay, or the slot of an equal value, reads the value. If so, a backward that may write into it gets a
    copy."""
    state_after: tuple[int, torch.device] | None = None
    """(value, device) of the generator state that the call takes after it has packed this slot, if any."""
    position: dict[int, int] = field(init=False)
    """The index of each needed value in `needs`."""

    def __post_init__(self) -> None:
        self.position = {value: index for index, value in enumerate(self.needs or ())}


class Schedule:
    """Replay programs for one order of unpacks. Immutable, so that a backward under way can rely on it."""

    __slots__ = ("order", "programs")

    def __init__(self, tape: Tape, store: StorageMap, order: tuple[int, ...], given_back: frozenset[int]) -> None:
        self.order = order
        self.programs: list[ReplayProgram] = schedule(tape, store, order, given_back)

    def resized(self, operators: Callable[[int], TapeOperator], tape: Tape) -> Schedule:
        """Return the same programs on `tape`, whose operators differ in numbers alone."""
        other = copy(self)
        other.programs = [
            replace(program, steps=tuple([s.resized(operators(s.operator.index), tape) for s in program.steps]))
            if program.steps
            else program
            for program in self.programs
        ]
        return other


class ExecutionPlan:
    """One plan on one tape, shared by all calls and all blocks whose tapes have equal digests.

    `choices` has an entry for every activation. `shared` are inputs that are held outside of the block anyway. A value
    that the plan takes from an equal one (`Tape.equal`) has no cell of its own: its slots read the cell of that value.
    """

    def __init__(self, tape: Tape, choices: dict[int, Choice], shared: Iterable[int] = ()) -> None:
        self.tape = tape
        self.num_values = len(tape.values)
        self.num_slots = len(tape.slots)
        self.device_type = next((value.device.type for value in tape.values), "cpu")
        self.is_plain = all(choice.action is Action.RETAIN for choice in choices.values())
        self.store = _store(tape, choices, frozenset(shared))
        self._equal = equal = _taken_from_equals(tape, choices)
        self._merged: Tape | None = merged(tape, equal) if equal else tape
        in_cells = {value for value, choice in choices.items() if choice.action is not Action.RETAIN} | {
            *equal.values()
        }
        self.needs = {value: self._roots_of(value) for value in self._merged.saved_values() if value in in_cells}
        saved = {value for value in self.needs if value in self.store.compressed}
        self.roots = tuple(sorted(saved.union(*self.needs.values())))
        """Values that get a cell: encoded ones, and tensors that a replay reads."""
        read = {*self._read_by_replay(), *equal.values()}
        self.slots = [self._slot(ref.value, read) for ref in self._merged.slots]
        self.first_state: tuple[int, torch.device] | None = None
        """(value, device) of the generator state that a call takes before the block runs, if any."""
        self.draws = False
        """Whether replay draws random numbers again."""
        self._place_states()
        self.encode_views = {value: encode_view(tape, value) for value in self.store.compressed}
        self.externals = self._externals()
        """(value, source) of the inputs, parameters, buffers and held tensors that a call must hold for replay."""
        self.held = [place for place, (_, source) in enumerate(self.externals) if source.place in PLACES]
        """Indices in `externals` of held tensors (tape/inputs.py). Most blocks have none."""
        self._expected = self._expected_of_held()
        looked_up = {value for value, _ in self.externals}
        self._sharing = [each for each in tape.sharing if each[0] in looked_up]
        self._given_back = frozenset(slot.value for slot in self.slots if slot.needs is None)
        self.follow(tape.order or tuple(reversed(range(self.num_slots))))

    def follow(self, order: tuple[int, ...]) -> None:
        """Prepare for a backward that asks for slots in `order`. Calls under way keep their schedule."""
        self.schedule = Schedule(self._with_equals, self.store, order, self._given_back)

    def resized(self, tape: Tape) -> ExecutionPlan:
        """Return the same plan on `tape`, a tape of the same family."""
        if tape.order and self.schedule.order != tape.order:
            self.follow(tape.order)
        plan = copy(self)
        plan.tape, plan._merged = tape, None
        plan.encode_views = {value: encode_view(tape, value) for value in self.store.compressed}
        equal = self._equal

        def operator_of(index: int) -> TapeOperator:
            return substituted(tape.operators[index], equal) if equal else tape.operators[index]

        plan.schedule = self.schedule.resized(operator_of, tape)
        return plan

    @property
    def _with_equals(self) -> Tape:
        """The tape with each value that the plan takes from an equal one replaced by that one."""
        if self._merged is None:
            self._merged = merged(self.tape, self._equal) if self._equal else self.tape
        return self._merged

    def has_all(
        self, externals: list[tuple[int, torch.Tensor | None]], find: Callable[[Source], torch.Tensor | None]
    ) -> TypeGuard[list[tuple[int, torch.Tensor]]]:
        """Return True if the block's own tensors are there in this call, with the layout that they have on the tape.

        The layout of arguments is part of the call's key. `find` returns the tensor at a source in this call.
        """
        for place, size, stride, offset, dtype, device in self._expected:
            tensor = externals[place][1]
            if tensor is None:
                return False
            if type(tensor) not in PLAIN:
                tensor = local_of(tensor)
            if (
                tensor.storage_offset() != offset
                or tensor.shape != size
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or tensor.device != device
            ):
                return False
        return not self._sharing or self._is_shared(find)

    def _is_shared(self, find: Callable[[Source], torch.Tensor | None]) -> bool:
        """Return True if tensors that shared a storage when recorded share one in this call, with the same layout."""
        for value, source, geometry in self._sharing:
            first, other = find(self._source_of(value)), find(source)
            if first is None or other is None:
                return False
            first, other = local_of(first), local_of(other)
            is_same = storage_key(first.untyped_storage()) == storage_key(other.untyped_storage())
            if not is_same or geometry_of(other) != geometry:
                return False
        return True

    def _expected_of_held(self) -> list[tuple[int, Any, Any, int, torch.dtype, torch.device]]:
        """Return (index in `externals`, size, stride, offset, dtype, device) of the tensors that are no arguments."""
        expected = []
        for place, (value, source) in enumerate(self.externals):
            if source.place != "argument":
                was = self.tape.values[value]
                expected.append((place, *was.ref.geometry, was.ref.dtype, was.device))
        return expected

    def replaced(self, before: list[tuple[int, torch.Tensor]], block: nn.Module) -> Source | None:
        """Return the source of a held tensor that the call has replaced by another one, or None.

        `before` are the externals from the beginning of the call.
        """
        for place in self.held:
            _, source = self.externals[place]
            now = find_external(source, block, (), {})
            if now is None or storage_key(now.untyped_storage()) != storage_key(before[place][1].untyped_storage()):
                return source
        return None

    def program_out_of_order(self, slot: int, environment: Environment) -> ReplayProgram:
        """Return the program of an unpack that comes at another place than the schedule has it."""
        made = {value for value, tensor in enumerate(environment) if tensor is not None}
        return single_program(self._with_equals, self.store, slot, made)

    def _roots_of(self, value: int) -> tuple[int, ...]:
        """Return the stored values that recomputing `value` from scratch reads."""
        _, leaves = closure(self._with_equals, value, self.store.__contains__)
        return tuple(leaf for leaf in leaves if leaf in self.store.retained or leaf in self.store.compressed)

    def _read_by_replay(self) -> set[int]:
        """Return the values that replay reads, without those that exist outside of the block, as parameters do."""
        runs = [closure(self._with_equals, value, self.store.__contains__)[0] for value in self.needs]
        read = {value for run in runs for number in run for value in self._with_equals.operators[number].inputs()}
        return {value for value in read if not self.tape.is_held_elsewhere(value)}

    def _slot(self, value: int, read: set[int]) -> Slot:
        return Slot(
            value=value,
            in_cell=value in self.roots,
            needs=self.needs.get(value),
            checks_offset=self.tape.values[value].source is None,
            is_read_by_replay=value in read,
        )

    def _place_states(self) -> None:
        """Set when a call takes the generator states that its replay draws from (rule R5)."""
        for num_saved, value, device in self.tape.drawing():
            if value in self.roots:
                self.draws = True
                if num_saved:
                    self.slots[num_saved - 1].state_after = value, device
                else:
                    self.first_state = value, device

    def _externals(self) -> list[tuple[int, Source]]:
        read = {
            value for needs in self.needs for value in closure(self._with_equals, needs, self.store.__contains__)[1]
        }
        saved = set(self._with_equals.saved_values())
        early = [v for v in sorted(read) if v in self.store.persistent or (v in self.roots and v not in saved)]
        return [(value, self._source_of(value)) for value in early if not self.tape.is_generator_state(value)]

    def _source_of(self, value: int) -> Source:
        source = self.tape.values[value].source
        assert source is not None  # no operator of the block makes an external
        return source


def _store(tape: Tape, choices: dict[int, Choice], shared: frozenset[int]) -> StorageMap:
    state = {value.index for value in tape.values if tape.is_module_state(value.index)}
    compressed = {value for value, choice in choices.items() if choice.action is Action.COMPRESS}
    retained = {value for value, choice in choices.items() if choice.action is Action.RETAIN}
    retained = {value for value in retained if not tape.values[value].overwritten}
    retained |= {value for _, value, _ in tape.drawing()}
    return StorageMap(frozenset(state | shared), frozenset(retained), frozenset(compressed))


def _taken_from_equals(tape: Tape, choices: dict[int, Choice]) -> dict[int, int]:
    """Return the values that the plan takes from an equal one, which it has a choice for, in place of storing them."""
    if all(choice != RECOMPUTE for choice in choices.values()):
        return {}
    saved = set(tape.saved_values())
    not_stored = {value for value in tape.equal if value not in saved or choices.get(value) == RECOMPUTE}
    return {value: tape.equal[value] for value in sorted(not_stored) if tape.equal[value] in choices}


def encode_view(tape: Tape, value: int) -> TensorRef:
    """Return the value's base with its dimensions in the order of memory, so that a codec reads one dense stretch."""
    ref = tape.values[value].ref
    size, stride, offset = ref.geometry
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    return TensorRef(value, (tuple(size[d] for d in order), tuple(stride[d] for d in order), offset), ref.dtype)


# Fitting a plan's choices to a tape that they may not have been made for.


def can_follow(choice: Choice, tape: Tape, value: int) -> bool:
    """Return True if `choice` can be carried out for `value` of `tape`."""
    if choice.action is Action.RECOMPUTE:
        return value in tape.recomputable
    if choice.action is Action.COMPRESS:
        record, codec = tape.values[value], codec_of(choice)
        return record.is_encodable and codec.supports(record.ref.geometry[0], record.ref.dtype)
    return True


def choices_by_value(
    choices: Mapping[int, Choice], tape: Tape, same: Mapping[int, int], with_loss: bool
) -> dict[int, Choice]:
    """Return `choices` for the values of `tape` that the planned tape has too, and the least memory for all others.

    `same` maps the planned tape's values to those of `tape`. Unless `with_loss`, lossy codecs are left out, since their
    effect on gradients was measured for the planned operators alone.
    """
    planned = {same[value]: choice for value, choice in choices.items() if value in same}
    shared = {value for value in same.values() if tape.is_block_input(value)} - planned.keys()
    fitted = {value: choice for value, choice in least_memory_choices(tape).items() if value not in shared}
    for value in fitted.keys() & planned.keys():
        choice = planned[value]
        if can_follow(choice, tape, value) and (with_loss or choice.codec is None or codec_of(choice).lossless):
            fitted[value] = choice
    return fitted | dict.fromkeys(unfit(fitted, tape), RETAIN)


def unfit(choices: Mapping[int, Choice], tape: Tape) -> list[int]:
    """Return the values whose choice cannot be carried out on `tape`, or would replay what must be exact (rule R14)."""
    coded = {v for v, c in choices.items() if c.action is Action.COMPRESS and not codec_of(c).lossless}
    exact = index_values(
        ((operator.inputs(), operator.made()) for operator in tape.operators),
        lambda value: _counts_as_index(tape, value),
        coded,
        set(tape.saved_values()),
    )

    def is_unfit(value: int, choice: Choice) -> bool:
        if not can_follow(choice, tape, value):
            return True
        return choice == RECOMPUTE and (value in exact or _is_statistic_of(coded, value, choices, tape))

    return [value for value, choice in choices.items() if is_unfit(value, choice)]


def _counts_as_index(tape: Tape, value: int) -> bool:
    """Return True for a value of indices, and for one that a Function has drawn, which may depend on data."""
    record = tape.values[value]
    maker = None if record.producer is None else tape.operators[record.producer]
    is_drawn = maker is not None and maker.is_function and maker.random
    return is_drawn or is_index(str(record.ref.dtype).removeprefix("torch."))


def _is_statistic_of(coded: Collection[int], value: int, choices: Collection[int], tape: Tape) -> bool:
    """Return True if a value has one number for each row, and a replay would make it from rows in `coded`."""

    def reads(made: int) -> tuple[int, ...]:
        producer = tape.values[made].producer
        return () if producer is None else tape.operators[producer].inputs()

    if not is_statistic(tape.values[value].ref.geometry[0]):
        return False
    return not made_from(value, reads, choices.__contains__).isdisjoint(coded)


def codec_of(choice: Choice) -> Codec:
    """Return the codec of a choice to compress. Raises ValueError if it names none, or an unknown one."""
    if choice.codec is None:
        raise ValueError(f"codec=None for a choice to {choice}: choose from {', '.join(list_codecs())}")
    return get_codec(choice.codec, **dict(choice.options))


def least_memory_choices(tape: Tape) -> dict[int, Choice]:
    """Return the lossless choices that store least."""
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    made = [value for value in tape.saved_values() if tape.values[value].source is None]
    return dict.fromkeys(inputs, RETAIN) | {value: least_memory(tape, value) for value in made}


def least_memory(tape: Tape, value: int) -> Choice:
    """Return the lossless choice that stores least for a value that the block made."""
    record = tape.values[value]
    if value in tape.recomputable:
        return RECOMPUTE
    is_mask = record.is_encodable and (record.ref.dtype is torch.bool or _is_drawn_mask(tape, value))
    codecs = map(get_codec, codecs_suiting(MASK) if is_mask else ())
    size, dtype = record.ref.geometry[0], record.ref.dtype
    able = [codec for codec in codecs if codec.supports(size, dtype)]
    smallest = min(able, key=lambda codec: codec.predicted_bytes(size, dtype), default=None)
    return RETAIN if smallest is None else Choice(action=Action.COMPRESS, codec=smallest.name)


def _is_drawn_mask(tape: Tape, value: int) -> bool:
    """Return True if a value's elements are 0 or one other number: zeros and ones that were drawn, perhaps divided.

    Dropout's mask on a CPU is made so.
    """
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return operator.short_name == "bernoulli"
    # By more than 0: a mask of -0.0 has three bit patterns.
    is_scaled = operator.short_name == "div" and len(operator.args) == 2 and isinstance(operator.args[1], (int, float))
    return is_scaled and operator.args[1] > 0 and _is_drawn_mask(tape, operator.inputs()[0])
