"""Replaying operators of a tape: one step, and a schedule of steps over a block's backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from adacc_hf.artifacts.block_walk import DECODED_KEPT
from adacc_hf.tape.tape import Blank, Geometry, Tape, TapeOperator, TensorRef, leaves, map_tensors, tensor_refs
from adacc_hf.torch_glue.private import schema_of
from adacc_hf.torch_glue.rng_state import drawing_from
from adacc_hf.torch_glue.tensors import copy_with_storage

Environment = list["torch.Tensor | None"]
"""The base tensor of every value that is at hand, by value index."""


def view(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """The tensor that `ref` describes, on the storage of `base` (rule R2: same size, stride, offset and dtype)."""
    if base.dtype is ref.dtype:
        return base.as_strided(*ref.geometry)
    size, stride, offset = ref.geometry
    return torch.empty(0, dtype=ref.dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def share_elements(left: TensorRef, right: TensorRef) -> bool:
    """Whether two views of one storage have elements in common; those of other sizes are taken to."""
    if left.dtype.itemsize != right.dtype.itemsize:
        return True
    ends = [
        offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        for size, stride, offset in (left.geometry, right.geometry)
    ]
    taken = torch.zeros(max(*ends, 0), dtype=torch.bool, device="cpu")
    taken.as_strided(*left.geometry).fill_(True)
    return bool(taken.as_strided(*right.geometry).any())


def takes_device(operator: TapeOperator) -> bool:
    """Whether an operator can be told the device of its result, so that its `Blank` needs no memory."""
    return any(argument.name == "device" for argument in schema_of(operator.target).arguments)


def stand_in(blank: Blank, device: torch.device | str) -> torch.Tensor:
    """A tensor that lies as `blank` does, of whatever elements."""
    size, stride, offset = blank.geometry
    if not offset:
        return torch.empty_strided(size, stride, dtype=blank.dtype, device=device)
    # Kernels may go by where a tensor begins in its storage.
    storage = torch.empty(offset + blank.nbytes // blank.dtype.itemsize, dtype=blank.dtype, device=device)
    return storage.as_strided(size, stride, offset)


class PreparedOperator:
    """An operator of a tape with its arguments laid out, so that a replay puts tensors in their places and calls it."""

    def __init__(self, operator: TapeOperator, tape: Tape) -> None:
        self.operator = operator
        self._target: Callable[..., Any] = operator.target
        self._args = list(operator.args)
        self._kwargs = operator.kwargs
        self._tensors: list[tuple[int, TensorRef, Geometry | None]] = []
        """(position, reference, geometry) of each tensor among the arguments; no geometry for a whole base."""
        nested = any(_holds_tensor(arg) for arg in operator.args if not isinstance(arg, TensorRef))
        self._nested = nested or _holds_tensor(operator.kwargs)
        self._blanks: list[tuple[int, Blank]] = []
        for position, argument in enumerate(operator.args):
            if isinstance(argument, TensorRef):
                base = tape.values[argument.value].ref
                is_base = base.geometry == argument.geometry and base.dtype is argument.dtype
                self._tensors.append((position, argument, None if is_base else argument.geometry))
            elif isinstance(argument, Blank) and takes_device(operator):
                self._args[position] = stand_in(argument, "meta")
                self._kwargs = operator.kwargs | {"device": operator.kwargs.get("device") or argument.device}
            elif isinstance(argument, Blank):
                self._blanks.append((position, argument))
        self._device = tape.values[operator.made()[0]].device
        # A Function's forward is Python that may have changed since; torch's checkpoint compares as much.
        made = operator.outputs if operator.is_function else ()
        self._expected = tuple((position, tape.values[value].ref) for position, value in made)

    def run(self, at_hand: list[torch.Tensor]) -> Sequence[Any]:
        """Run the operator on the tensors `at_hand`, by value, and return its results, flattened."""
        if self.operator.generator is None:
            result = self._call(at_hand)
        else:
            with drawing_from(at_hand[self.operator.generator], self._device):
                result = self._call(at_hand)
        made = (result,) if isinstance(result, torch.Tensor) else leaves(result)
        if self._expected and not all(_is_like(made, position, ref) for position, ref in self._expected):
            raise RuntimeError(
                f"{self.operator.name} makes or saves other tensors when its forward runs again in backward: have it "
                f"depend on its arguments alone, or train without replay (AdaccConfig(actions=('retain', 'compress')))"
            )
        return made

    def _call(self, at_hand: list[torch.Tensor]) -> Any:
        if self._nested:
            args, kwargs = map_tensors(
                (self.operator.args, self._kwargs), TensorRef, lambda ref: view(at_hand[ref.value], ref)
            )
            return self._target(*args, **kwargs)
        args = self._args.copy()
        for position, ref, geometry in self._tensors:
            base = at_hand[ref.value]
            if geometry is None:
                args[position] = base
            elif base.dtype is ref.dtype:
                args[position] = base.as_strided(*geometry)
            else:
                args[position] = view(base, ref)
        for position, blank in self._blanks:
            args[position] = stand_in(blank, blank.device)
        return self._target(*args, **self._kwargs)


class ReplayStep:
    """One operator of a tape as a plan runs it: what is fetched before, copied, taken from its results and freed."""

    def __init__(self, operator: TapeOperator, tape: Tape) -> None:
        self.operator, self._tape = operator, tape
        self.outputs = operator.outputs
        self.mutations = operator.mutations
        self.copies: tuple[int, ...] = tuple(old for old, _ in operator.mutations)
        """Values that must be copied before this operator overwrites them (rule R6)."""
        self.loads: tuple[int, ...] = ()
        """Values to fetch from the store just before: decoded any earlier they would add to other operators' peak."""
        self.frees: tuple[int, ...] = ()
        """Values nobody needs once this operator has run."""

    def resized(self, operator: TapeOperator, tape: Tape) -> ReplayStep:
        """The same step on `tape`, whose `operator` differs from this one's in numbers alone."""
        step = copy(self)
        step.operator, step._tape = operator, tape
        return step

    def run(self, environment: Environment) -> None:
        """Run the operator on the values in `environment` and put what it makes there."""
        at_hand: list[torch.Tensor] = environment  # type: ignore[assignment]  # what it reads was put there before
        untouched = [at_hand[old] for old in self.copies]
        for old in self.copies:
            environment[old] = copy_with_storage(at_hand[old])
        operator = self.operator
        if operator.prepared is None:  # once for all plans of a tape
            operator.prepared = PreparedOperator(operator, self._tape)
        made = operator.prepared.run(at_hand)
        for position, value in self.outputs:
            environment[value] = made[position]
        for old, new in self.mutations:
            environment[new] = environment[old]
        for old, tensor in zip(self.copies, untouched, strict=True):
            environment[old] = tensor
        for value in self.frees:
            environment[value] = None


def _is_like(made: Sequence[Any], position: int, ref: TensorRef) -> bool:
    tensor = made[position] if position < len(made) else None
    if not isinstance(tensor, torch.Tensor):
        return False
    size, stride, offset = ref.geometry
    lies_alike = tensor.shape == size and tensor.stride() == stride and tensor.storage_offset() == offset
    return lies_alike and tensor.dtype is ref.dtype


def _holds_tensor(tree: Any) -> bool:
    return next(tensor_refs(tree), None) is not None


@dataclass(frozen=True, slots=True)
class StorageMap:
    """Where each value is found without replay."""

    persistent: frozenset[int]
    """Parameters, buffers and shared inputs: in the environment from the start."""
    retained: frozenset[int]
    """Tensors kept for backward: fetched for one unpack at a time, since only the slots that need them may own them."""
    compressed: frozenset[int]
    """Payloads kept for backward: decoded when an unpack needs them, and kept decoded if another one soon does."""

    def __contains__(self, value: int) -> bool:
        return value in self.persistent or value in self.retained or value in self.compressed


@dataclass(frozen=True, slots=True)
class ReplayProgram:
    """What one unpack runs: steps, then values to fetch from the store, then values to let go."""

    loads: tuple[int, ...]
    """Values that the slot itself takes from the store; steps have their own."""
    steps: tuple[ReplayStep, ...]
    frees: tuple[int, ...]
    reads: tuple[int, ...]
    """What of the persistent values it reads."""

    def fetched(self) -> list[int]:
        """All values that it takes from the store."""
        return [*(value for step in self.steps for value in step.loads), *self.loads]


def closure(tape: Tape, value: int, at_hand: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """What recomputing `value` takes: (operators in order, values read that are at hand or come from outside)."""
    operators: set[int] = set()
    leaves: dict[int, None] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        producer = tape.values[current].producer
        if producer is None or at_hand(current):
            leaves[current] = None
        elif producer not in operators:
            operators.add(producer)
            pending += tape.operators[producer].inputs()
    return sorted(operators), list(leaves)


def schedule(
    tape: Tape, store: StorageMap, order: Sequence[int], given_back: Collection[int] = ()
) -> list[ReplayProgram]:
    """The program of each unpack, if slots are asked for in `order`.

    Each operator runs at most once, at the first unpack that needs it; what a later unpack needs is kept, and every
    value goes with its last use. Slots of the values `given_back` run none: autograd gets back the very tensor.
    """
    made: set[int] = set()
    runs = []
    for value in (tape.slots[slot].value for slot in order):
        runs.append([] if value in given_back else missing_operators(tape, store, value, made))
        made.update(value for operator in runs[-1] for value in tape.operators[operator].made())
    uses = _last_uses(tape, order, runs)
    values = [tape.slots[slot].value for slot in order]
    programs = [_program(tape, store, value, rank, runs[rank], uses) for rank, value in enumerate(values)]
    return [_drop_decoded(program, store, programs[rank + 1 :][:DECODED_KEPT]) for rank, program in enumerate(programs)]


def _drop_decoded(program: ReplayProgram, store: StorageMap, next_programs: Sequence[ReplayProgram]) -> ReplayProgram:
    """`program`, letting go of decoded values that none of `next_programs` fetches."""
    soon = {value for later in next_programs for value in later.fetched()}
    dropped = [value for value in program.fetched() if value in store.compressed and value not in soon]
    return replace(program, frees=tuple(dict.fromkeys([*program.frees, *dropped])))


def single_program(tape: Tape, store: StorageMap, slot: int, made: set[int]) -> ReplayProgram:
    """The program of an unpack out of order, when the values `made` are at hand; nothing recomputed is let go."""
    value = tape.slots[slot].value
    run = missing_operators(tape, store, value, made)
    forever = (1, 0)
    uses = dict.fromkeys(range(len(tape.values)), forever)
    return _program(tape, store, value, 0, run, uses)


def missing_operators(tape: Tape, store: StorageMap, value: int, made: set[int]) -> list[int]:
    """Operators to run so that `value` is at hand when the values `made` are."""
    return closure(tape, value, lambda v: v in store or v in made)[0]


def _last_uses(tape: Tape, order: Sequence[int], runs: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Last (rank, step) that needs each value; the step past a run's last one is the slot itself."""
    last: dict[int, tuple[int, int]] = {}
    for rank, (slot, run) in enumerate(zip(order, runs, strict=True)):
        for step, number in enumerate(run):
            operator = tape.operators[number]
            last.update(dict.fromkeys([*operator.inputs(), *operator.made()], (rank, step)))
        last[tape.slots[slot].value] = (rank, len(run))
    return last


def _program(
    tape: Tape, store: StorageMap, value: int, rank: int, run: list[int], uses: dict[int, tuple[int, int]]
) -> ReplayProgram:
    read = dict.fromkeys([v for number in run for v in tape.operators[number].inputs()] + [value])
    stored = {v for v in read if v in store.retained or v in store.compressed}
    steps = tuple(_step(tape, store, number, (rank, index), uses) for index, number in enumerate(run))
    for step in steps:
        step.loads = tuple(v for v in dict.fromkeys(step.operator.inputs()) if v in stored)
        stored.difference_update(step.loads)
    ended = [v for v in read if v not in store.persistent and uses[v] <= (rank, len(run))]
    kept_out = [v for v in read if v in store.retained]
    persistent = tuple(v for v in read if v in store.persistent)
    return ReplayProgram(tuple(stored & {value}), steps, tuple(dict.fromkeys([*ended, *kept_out])), persistent)


def _step(
    tape: Tape, store: StorageMap, number: int, moment: tuple[int, int], uses: dict[int, tuple[int, int]]
) -> ReplayStep:
    operator = tape.operators[number]
    step = ReplayStep(operator, tape)
    step.outputs = tuple((position, v) for position, v in operator.outputs if v not in store)
    step.copies = tuple(old for old, _ in operator.mutations if old in store or uses[old] > moment)
    touched = dict.fromkeys([*operator.inputs(), *operator.made()])
    step.frees = tuple(v for v in touched if v not in store.persistent and uses[v] == moment)
    return step
