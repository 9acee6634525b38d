"""Replay in backward of operators recorded on a tape: single steps, and their schedule over the backward of a block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adacc_hf.artifacts.block_walk import DECODED_CACHE_UNPACKS
from adacc_hf.tape.operator_effects import moves_storage
from adacc_hf.tape.tape import Blank, Tape, TapeOperator, TensorRef, leaves, map_tensors, tensor_refs
from adacc_hf.torch_glue.private import schema_of
from adacc_hf.torch_glue.rng_state import draw_from_state
from adacc_hf.torch_glue.tensors import copy_with_storage

Environment = list["torch.Tensor | None"]
"""Tensors that are available in a replay: for each value of a tape, by value index, a tensor that covers the whole
value. None for a value that is not available."""


def view(base: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Return the tensor that the recorded reference `ref` describes (rule R2), as a view of `base`."""
    if base.dtype is ref.dtype:
        return base.as_strided(*ref.geometry)
    size, stride, offset = ref.geometry
    return torch.empty(0, dtype=ref.dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def share_elements(first: TensorRef, second: TensorRef) -> bool:
    """Return True if two views of one storage overlap. Views with different item sizes count as overlapping."""
    if first.dtype.itemsize != second.dtype.itemsize:
        return True
    ends = [
        offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        for size, stride, offset in (first.geometry, second.geometry)
    ]
    is_occupied = torch.zeros(max(*ends, 0), dtype=torch.bool, device="cpu")
    is_occupied.as_strided(*first.geometry).fill_(True)
    return bool(is_occupied.as_strided(*second.geometry).any())


def takes_device(operator: TapeOperator) -> bool:
    """Return True if an operator has a `device` argument. Replay can then pass a meta tensor in place of a `Blank`."""
    return any(argument.name == "device" for argument in schema_of(operator.target).arguments)


def stand_in(blank: Blank, device: torch.device | str) -> torch.Tensor:
    """Return an uninitialized tensor with the layout of `blank`."""
    size, stride, offset = blank.geometry
    if not offset:
        return torch.empty_strided(size, stride, dtype=blank.dtype, device=device)
    # Kernels may depend on the storage offset.
    storage = torch.empty(offset + blank.nbytes // blank.dtype.itemsize, dtype=blank.dtype, device=device)
    return storage.as_strided(size, stride, offset)


class PreparedOperator:
    """An operator of a tape, prepared so that `run` only inserts tensors into the arguments and calls the operator."""

    def __init__(self, operator: TapeOperator, tape: Tape) -> None:
        self.operator = operator
        self._target: Callable[..., Any] = operator.target
        self._args = list(operator.args)
        self._kwargs = operator.kwargs
        self._tensors: list[tuple[int, TensorRef, bool]] = []
        """(position, reference, True if it is the value's first recorded tensor, no other view) of each tensor."""
        has_nested_tensors = any(_holds_tensor(arg) for arg in operator.args if not isinstance(arg, TensorRef))
        self._has_nested_tensors = has_nested_tensors or _holds_tensor(operator.kwargs)
        self._blanks: list[tuple[int, Blank]] = []
        for position, argument in enumerate(operator.args):
            if isinstance(argument, TensorRef):
                base = tape.values[argument.value].ref
                is_base = base.geometry == argument.geometry and base.dtype is argument.dtype
                self._tensors.append((position, argument, is_base))
            elif isinstance(argument, Blank) and takes_device(operator):
                self._args[position] = stand_in(argument, "meta")
                self._kwargs = operator.kwargs | {"device": operator.kwargs.get("device") or argument.device}
            elif isinstance(argument, Blank):
                self._blanks.append((position, argument))
        self._device = tape.values[operator.results()[0]].device
        # A Function's forward is Python that may have changed. torch's checkpoint compares the same metadata.
        expected_outputs = operator.outputs if operator.is_function else ()
        self._expected = tuple((position, tape.values[value].ref) for position, value in expected_outputs)

    def run(self, bases: list[torch.Tensor]) -> Sequence[Any]:
        """Run the operator on `bases`, the available tensors by value index, and return its flattened results."""
        if self.operator.generator is None:
            result = self._call(bases)
        else:
            with draw_from_state(bases[self.operator.generator], self._device):
                result = self._call(bases)
        results = (result,) if isinstance(result, torch.Tensor) else leaves(result)
        if self._expected and not all(_is_like_recorded(results, position, ref) for position, ref in self._expected):
            raise RuntimeError(
                f"{self.operator.name} returns or saves different tensors when its forward runs again in backward: "
                f"make it depend only on its arguments, or train without replay "
                f"(AdaccConfig(actions=('retain', 'compress')))"
            )
        return results

    def _call(self, bases: list[torch.Tensor]) -> Any:
        if self._has_nested_tensors:
            args, kwargs = map_tensors(
                (self.operator.args, self._kwargs), TensorRef, lambda ref: view(bases[ref.value], ref)
            )
            return self._target(*args, **kwargs)
        args = self._args.copy()
        for position, ref, is_base in self._tensors:
            args[position] = bases[ref.value] if is_base else view(bases[ref.value], ref)
        for position, blank in self._blanks:
            args[position] = stand_in(blank, blank.device)
        return self._target(*args, **self._kwargs)


class ReplayStep:
    """Replay of one operator of a tape, as one step of a schedule."""

    def __init__(self, operator: TapeOperator, tape: Tape) -> None:
        self.operator, self._tape = operator, tape
        self.outputs = operator.outputs
        self.mutations = operator.mutations
        self.copies: tuple[int, ...] = tuple(old for old, _ in operator.mutations)
        """Values to copy before the operator runs, because the operator overwrites them in place. Replay must not
        change a version of a storage that is needed later (rule R6)."""
        self.loads: tuple[int, ...] = ()
        """Stored values to fetch, and so decode, immediately before this operator, not before other steps."""
        self.frees: tuple[int, ...] = ()
        """Values to free after this operator has run."""

    def run(self, environment: Environment) -> None:
        """Run the operator on the tensors in `environment` (by value index), and put the results into `environment`."""
        bases: list[torch.Tensor] = environment  # type: ignore[assignment]  # its inputs were put there before
        originals = [bases[old] for old in self.copies]
        for old in self.copies:
            environment[old] = copy_with_storage(bases[old])
        operator = self.operator
        if operator.prepared is None:  # shared by all plans of a tape
            operator.prepared = PreparedOperator(operator, self._tape)
        results = operator.prepared.run(bases)
        for position, value in self.outputs:
            environment[value] = results[position]
        for old, new in self.mutations:
            environment[new] = environment[old]
        for old, tensor in zip(self.copies, originals, strict=True):
            environment[old] = tensor
        for value in self.frees:
            environment[value] = None


def recorded_environment(tape: Tape, bases: Sequence[torch.Tensor]) -> Environment:
    """Return the recorded tensors `bases`, with None for those that are freed or overwritten."""
    pairs = zip(tape.values, bases, strict=True)
    return [None if value.overwritten or value.is_freed(base) else base for value, base in pairs]


def walk(tape: Tape, environment: Environment) -> Iterator[TapeOperator]:
    """Yield the operators of a tape in order. Meanwhile, `environment` contains the tensors that the operator reads and
    returns: those of `recorded_environment`, and, for the other values, the results of a replay, which are freed after
    their last reader. None stands for tensors that replay cannot compute."""
    is_recorded = [tensor is not None for tensor in environment]
    last_readers = [max(tape.consumers(value.index), default=-1) for value in tape.values]
    for operator in tape.operators:
        results = {value: environment[value] for value in operator.results()}
        may_run = operator.may_run_again and (tape.untrusted or not tape.verified.isdisjoint(results))
        may_run = may_run and not moves_storage(operator)  # readers would find the old storage
        is_ready = may_run and all(environment[value] is not None for value in operator.inputs())
        if is_ready and any(tensor is None for tensor in results.values()):
            ReplayStep(operator, tape).run(environment)
            for value, tensor in results.items():
                environment[value] = environment[value] if tensor is None else tensor
        yield operator
        for value in (*operator.inputs(), *operator.results()):
            if last_readers[value] <= operator.index and not is_recorded[value]:
                environment[value] = None


def _is_like_recorded(results: Sequence[Any], position: int, ref: TensorRef) -> bool:
    tensor = results[position] if position < len(results) else None
    if not isinstance(tensor, torch.Tensor):
        return False
    size, stride, offset = ref.geometry
    has_layout = tensor.shape == size and tensor.stride() == stride and tensor.storage_offset() == offset
    return has_layout and tensor.dtype is ref.dtype


def _holds_tensor(tree: Any) -> bool:
    return next(tensor_refs(tree), None) is not None


@dataclass(frozen=True, slots=True)
class StorageMap:
    """Values of a tape that backward can read under a plan without recomputing them, grouped by how they are stored."""

    persistent: frozenset[int]
    """Parameters, buffers, tensors attached to the block, and inputs shared with other blocks, which always exist."""
    retained: frozenset[int]
    """Values stored as tensors until backward. Replay fetches a tensor for one unpack of a saved tensor at a time."""
    compressed: frozenset[int]
    """Values stored encoded until backward. A decoded tensor is kept if another unpack needs it soon."""

    def __contains__(self, value: int) -> bool:
        return value in self.persistent or value in self.retained or value in self.compressed


@dataclass(frozen=True, slots=True)
class ReplayProgram:
    """Instructions to unpack a saved tensor: run `steps`, fetch the stored values `loads`, free `frees`."""

    loads: tuple[int, ...]
    """Stored values to fetch for the saved tensor itself. The values to fetch for a step are in `ReplayStep.loads`."""
    steps: tuple[ReplayStep, ...]
    frees: tuple[int, ...]
    reads: tuple[int, ...]
    """Values among parameters and other tensors that always exist (`StorageMap.persistent`) that the program reads."""

    def fetched(self) -> list[int]:
        """Return all stored values that the program fetches, for its steps and for the saved tensor itself."""
        return [*(value for step in self.steps for value in step.loads), *self.loads]


def closure(tape: Tape, value: int, is_available: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Return (indices of operators, in order; values from which they start) to recompute a value of a tape."""
    operators: set[int] = set()
    leaves: dict[int, None] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        producer = tape.values[current].producer
        if producer is None or is_available(current):
            leaves[current] = None
        elif producer not in operators:
            operators.add(producer)
            pending += tape.operators[producer].inputs()
    return sorted(operators), list(leaves)


def schedule(
    tape: Tape, store: StorageMap, order: Sequence[int], passthrough: Collection[int] = ()
) -> list[ReplayProgram]:
    """Return a replay program for each saved tensor, for a backward that unpacks the saved tensors in `order`.

    `order` contains indices among the saved tensors (slots). Each operator runs at most once, at the first unpack that
    needs it. Results that a later unpack needs are kept, and each value is freed after its last use. For saved tensors
    of the values `passthrough`, no operator runs, because autograd keeps the tensor itself.
    """
    recomputed: set[int] = set()
    runs = []
    for value in (tape.slots[slot].value for slot in order):
        runs.append([] if value in passthrough else missing_operators(tape, store, value, recomputed))
        recomputed.update(value for operator in runs[-1] for value in tape.operators[operator].results())
    uses = _last_uses(tape, order, runs)
    values = [tape.slots[slot].value for slot in order]
    programs = [_replay_program(tape, store, value, rank, runs[rank], uses) for rank, value in enumerate(values)]
    return [
        _drop_decoded(program, store, programs[rank + 1 :][:DECODED_CACHE_UNPACKS])
        for rank, program in enumerate(programs)
    ]


def _drop_decoded(program: ReplayProgram, store: StorageMap, next_programs: Sequence[ReplayProgram]) -> ReplayProgram:
    """Return a copy of `program` that also frees the decoded values that none of `next_programs` reads."""
    soon = {value for later in next_programs for value in later.fetched()}
    dropped = [value for value in program.fetched() if value in store.compressed and value not in soon]
    return replace(program, frees=tuple(dict.fromkeys([*program.frees, *dropped])))


def single_program(tape: Tape, store: StorageMap, slot: int, available: set[int]) -> ReplayProgram:
    """Return the program that unpacks `slot` out of the scheduled order from the `available` values."""
    value = tape.slots[slot].value
    run = missing_operators(tape, store, value, available)
    never = (1, 0)
    uses = dict.fromkeys(range(len(tape.values)), never)
    return _replay_program(tape, store, value, 0, run, uses)


def missing_operators(tape: Tape, store: StorageMap, value: int, available: set[int]) -> list[int]:
    """Return the indices of the operators that recompute `value` from stored values and the values in `available`."""
    return closure(tape, value, lambda v: v in store or v in available)[0]


def _last_uses(tape: Tape, order: Sequence[int], runs: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Return, for each value, the place in backward at which replay uses the value last.

    Backward unpacks the saved tensors in `order`. To unpack the tensor at position k of `order`, replay runs the
    operators in `runs[k]`. A place (k, i) is operator i of `runs[k]` or, if i equals the number of these operators, the
    end of the unpacking.
    """
    last: dict[int, tuple[int, int]] = {}
    for rank, (slot, run) in enumerate(zip(order, runs, strict=True)):
        for step, number in enumerate(run):
            operator = tape.operators[number]
            last.update(dict.fromkeys([*operator.inputs(), *operator.results()], (rank, step)))
        last[tape.slots[slot].value] = (rank, len(run))
    return last


def _replay_program(
    tape: Tape, store: StorageMap, value: int, rank: int, run: list[int], uses: dict[int, tuple[int, int]]
) -> ReplayProgram:
    """Return the program that unpacks a saved view of `value`, after `rank` other saved tensors. `run` are the
    operators to run, and `uses` the places of last uses (`_last_uses`)."""
    values_read = dict.fromkeys([v for number in run for v in tape.operators[number].inputs()] + [value])
    stored = {v for v in values_read if v in store.retained or v in store.compressed}
    steps = tuple(_replay_step(tape, store, number, (rank, index), uses) for index, number in enumerate(run))
    for step in steps:
        step.loads = tuple(v for v in dict.fromkeys(step.operator.inputs()) if v in stored)
        stored.difference_update(step.loads)
    expired = [v for v in values_read if v not in store.persistent and uses[v] <= (rank, len(run))]
    retained = [v for v in values_read if v in store.retained]
    persistent = tuple(v for v in values_read if v in store.persistent)
    return ReplayProgram(tuple(stored & {value}), steps, tuple(dict.fromkeys([*expired, *retained])), persistent)


def _replay_step(
    tape: Tape, store: StorageMap, number: int, moment: tuple[int, int], uses: dict[int, tuple[int, int]]
) -> ReplayStep:
    """Return the step that replays operator `number` at the place `moment` in backward (see `_last_uses`)."""
    operator = tape.operators[number]
    step = ReplayStep(operator, tape)
    step.outputs = tuple((position, v) for position, v in operator.outputs if v not in store)
    step.copies = tuple(old for old, _ in operator.mutations if old in store or uses[old] > moment)
    touched = dict.fromkeys([*operator.inputs(), *operator.results()])
    step.frees = tuple(v for v in touched if v not in store.persistent and uses[v] == moment)
    return step
