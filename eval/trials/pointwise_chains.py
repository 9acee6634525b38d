"""Chains of pointwise operators in a replay program: where they are, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

import torch

from adacc_hf.tape.replay import Environment, ReplayProgram, ReplayStep, view
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, tensor_refs
from adacc_hf.torch_glue.private import TO_COPY


@dataclass(frozen=True)
class Chain:
    """Connected pointwise operators of one program that could run as one kernel.

    `replay.schedule` keeps a program's operators in the order of the forward. No operator outside of the chain stands
    between two of its operators in the flow of data, so that all of them can run at one moment.
    """

    steps: tuple[ReplayStep, ...]
    inputs: tuple[TensorRef, ...]
    """The tensors that it reads and does not make, each once."""
    outputs: tuple[int, ...]
    """The values that it makes and others read: later operators, or autograd."""

    @property
    def operators(self) -> list[TapeOperator]:
        return [step.operator for step in self.steps]

    @property
    def names(self) -> str:
        """Its operators, in order: "mul pow mul add"."""
        return " ".join(operator.short_name for operator in self.operators)

    def arguments(self, environment: Environment) -> list[torch.Tensor]:
        """The tensors of `inputs`, on what `environment` holds."""
        bases = [environment[ref.value] for ref in self.inputs]
        return [view(base, ref) for base, ref in zip(bases, self.inputs, strict=True) if base is not None]


def is_pointwise(operator: TapeOperator) -> bool:
    """Return True if each element of the operator's only result follows from the elements at its own place."""
    is_tagged = torch.Tag.pointwise in operator.target.tags or operator.target is TO_COPY
    is_torchs = operator.target.namespace == "aten" and not operator.is_collective
    is_determined = not operator.random and operator.generator is None and not operator.blanks()
    positions = [position for position, _ in operator.outputs]
    makes_one = len(operator.made()) == 1 and positions in ([], [0])
    holds_lists = any(isinstance(argument, (list, tuple)) for argument in operator.args)
    return is_tagged and is_torchs and is_determined and makes_one and not holds_lists


def find_chains(
    program: ReplayProgram, tape: Tape, may_join: Callable[[TapeOperator], bool] = is_pointwise
) -> list[Chain]:
    """The maximal chains of two operators or more in `program`, among the operators that `may_join`.

    An operator joins the chains of its inputs' makers, unless another operator has to run in between, or a view of what
    the chain makes is read within it.
    """
    steps = program.steps
    maker = {value: place for place, step in enumerate(steps) for value in step.operator.made()}
    viewed: set[tuple[int, int]] = set()
    """(maker, reader) of what is read through a view."""
    group = list(range(len(steps)))
    """The number of each step's group: the place of its latest step so far."""
    for place, step in enumerate(steps):
        if not may_join(step.operator):
            continue
        refs = [ref for ref in tensor_refs((step.operator.args, step.operator.kwargs)) if ref.value in maker]
        viewed.update((maker[ref.value], place) for ref in refs if not _is_whole(tape, ref))
        makers = [maker[ref.value] for ref in refs]
        joinable = sorted({group[made] for made in makers if may_join(steps[made].operator)}, reverse=True)
        for joined in (joinable, *([number] for number in joinable)):
            merged = [place if number in joined else number for number in group]
            is_viewed = any(merged[made] == merged[reader] for made, reader in viewed)
            if not is_viewed and _order(steps[: place + 1], merged) is not None:
                group = merged
                break
    members: dict[int, list[ReplayStep]] = {}
    for place, step in enumerate(steps):
        members.setdefault(group[place], []).append(step)
    return [_chain(program, chosen) for chosen in members.values() if len(chosen) > 1]


def _is_whole(tape: Tape, ref: TensorRef) -> bool:
    """Return True if a tensor is its value's base, not another view of it."""
    base = tape.values[ref.value].ref
    return ref.geometry == base.geometry and ref.dtype is base.dtype


def _order(steps: Sequence[ReplayStep], group: Sequence[int]) -> list[int] | None:
    """An order in which the groups of `steps` can run, close to the steps' own; None if there is none."""
    waits: dict[int, set[int]] = {number: set() for number in group[: len(steps)]}
    maker: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for step, number in zip(steps, group, strict=False):
        for value in step.operator.inputs():
            waits[number].add(maker.get(value, number))
            readers.setdefault(value, set()).add(number)
        for old, _ in step.operator.mutations:  # its readers come before what overwrites it
            waits[number] |= readers[old]
        maker.update(dict.fromkeys(step.operator.made(), number))
    sorter = TopologicalSorter({number: others - {number} for number, others in waits.items()})
    try:
        sorter.prepare()
    except CycleError:
        return None
    last = {number: place for place, number in enumerate(group[: len(steps)])}
    order: list[int] = []
    ready: set[int] = set()
    while sorter.is_active():
        ready.update(sorter.get_ready())
        order.append(min(ready, key=last.__getitem__))
        ready.remove(order[-1])
        sorter.done(order[-1])
    return order


def _chain(program: ReplayProgram, steps: Sequence[ReplayStep]) -> Chain:
    made = {value for step in steps for value in step.operator.made()}
    refs = dict.fromkeys(ref for step in steps for ref in tensor_refs((step.operator.args, step.operator.kwargs)))
    inside = {id(step) for step in steps}
    read_outside = {value for step in program.steps if id(step) not in inside for value in step.operator.inputs()}
    freed = {value for step in steps for value in step.frees}
    outputs = tuple(sorted(made & read_outside | made - freed))
    return Chain(tuple(steps), tuple(ref for ref in refs if ref.value not in made), outputs)


# A program in which chains run as one step.


class ChainStep:
    """A chain in the place of its operators, run by one function."""

    def __init__(self, chain: Chain, kernel: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
        self.operators = chain.operators
        self.loads = tuple(dict.fromkeys(value for step in chain.steps for value in step.loads))
        self.frees: tuple[int, ...] = ()
        self._chain, self._kernel = chain, kernel

    def run(self, environment: Environment) -> None:
        made = self._kernel(self._chain.arguments(environment))
        for value, tensor in zip(self._chain.outputs, made, strict=True):
            environment[value] = tensor
        for value in self.frees:
            environment[value] = None


def with_chains(program: ReplayProgram, kernels: Sequence[tuple[Chain, Callable[..., Any]]]) -> ReplayProgram:
    """`program`, in which each of these chains runs as its function. Values are let go after their last reader."""
    places = {id(step): number for number, (chain, _) in enumerate(kernels) for step in chain.steps}
    group = [places.get(id(step), len(kernels) + place) for place, step in enumerate(program.steps)]
    order = _order(program.steps, group)
    assert order is not None  # chains are such that there is one
    single = {number: step for number, step in zip(group, program.steps, strict=True) if number >= len(kernels)}
    steps = [ChainStep(*kernels[n]) if n < len(kernels) else copy(single[n]) for n in order]
    freed = {value for step in program.steps for value in step.frees}
    for step in reversed(steps):
        operators = step.operators if isinstance(step, ChainStep) else [step.operator]
        touched = dict.fromkeys(value for operator in operators for value in [*operator.inputs(), *operator.made()])
        step.frees = tuple(value for value in touched if value in freed)
        freed.difference_update(step.frees)
    return replace(program, steps=tuple(steps))  # type: ignore[arg-type]  # a step is what loads, runs and frees


# The bytes that a GPU's kernels move: each element that a kernel reads or writes, once.


def operator_bytes(operator: TapeOperator, tape: Tape) -> int:
    """Bytes that one operator reads and writes."""
    refs = dict.fromkeys(tensor_refs((operator.args, operator.kwargs)))
    return sum(map(_element_bytes, refs)) + _written_bytes(operator.made(), tape)


def chain_bytes(chain: Chain, tape: Tape) -> tuple[int, int]:
    """Bytes that a chain reads and writes as operators, and as one kernel."""
    before = sum(operator_bytes(operator, tape) for operator in chain.operators)
    return before, sum(map(_element_bytes, chain.inputs)) + _written_bytes(chain.outputs, tape)


def _element_bytes(ref: TensorRef) -> int:
    """Bytes of the elements that a tensor shows, those repeated by a stride of 0 once."""
    size, stride, _ = ref.geometry
    return ref.dtype.itemsize * prod(n for n, step in zip(size, stride, strict=True) if step)


def _written_bytes(made: Collection[int], tape: Tape) -> int:
    return sum(_element_bytes(tape.values[value].ref) for value in made)
