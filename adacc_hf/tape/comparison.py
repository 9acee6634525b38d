"""Recording a call beside the tape that it should fit: it takes no memory, and tells where the call leaves the tape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.tape.function_operators import (
    FunctionTarget,
    NotReplayableError,
    call_of,
    flattened,
    results_of,
    taken_apart,
)
from adacc_hf.tape.recorder import Recorder, may_write
from adacc_hf.tape.tape import Source, Tape, TapeOperator, TapeValue, leaves, map_tensors
from adacc_hf.torch_glue.private import TO_COPY


class CheckingRecorder(Recorder):
    """A recorder that compares as it goes.

    Of storages that the block makes only the addresses are kept, and of `wanted` values the tensors, until they are
    let go or, at the first operator or saved tensor that is not the tape's, handed to `on_leaving`. That comes before
    the operator runs if it changes a storage.
    """

    def __init__(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tape: Tape,
        wanted: Collection[int],
        on_leaving: Callable[[Mapping[int, torch.Tensor]], None],
    ) -> None:
        super().__init__(block, args, kwargs)
        self.has_left = False
        """Whether the call did anything that is not on the tape."""
        self._tape = tape
        self._wanted = frozenset(wanted)
        self._on_leaving = on_leaving
        self._at_hand: dict[int, torch.Tensor] = {}
        self._addresses: list[StorageWeakRef] = []
        """As long as these live, no other storage gets the address of one that died."""
        self._num_values = self._num_operators = 0
        """How many were compared so far, and are the tape's."""
        self._later: list[Callable[[], None]] | None = None
        """If a list, the calls to make once a Function has returned that is one operator of the tape."""

    def when_noted(self, saved: torch.Tensor, call: Callable[[], None]) -> bool:
        """Make a call once the Function that has `saved` a tensor is noted, if it is one operator of the tape.

        Return True then. Autograd saves a Function's tensors before the Function has returned.
        """
        if self._later is None:
            return False
        self._saved_inside.append(saved)
        self._later.append(call)
        return True

    def let_go(self, value: int) -> None:
        """Keep `value` no longer."""
        self._at_hand.pop(value, None)

    def save(self, tensor: torch.Tensor) -> int:
        slot = super().save(tensor)
        self._compare()
        expected = self._tape.slots[slot] if slot < len(self._tape.slots) else None
        if self.slots[slot] != expected:
            self._leave()
        return slot

    def finish(self) -> Tape:
        """The record of the call, which was as the tape says if its digest is the same. Call it after the block."""
        if (len(self.operators), len(self.slots)) != (len(self._tape.operators), len(self._tape.slots)):
            self._leave()
        return self.tape()

    def _record_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a Function; note it as one operator where the tape has one, else by the operators inside it."""
        if self._is_in_function or self._is_paused:
            return run()
        expected = self._next_function(function)
        with self._inside_function():
            return run() if expected is None else self._run_as(expected, function, args, run)

    def _next_function(self, function: type[Function]) -> TapeOperator | None:
        """The tape's next operator, if it is a Function; casts that autocast keeps are noted where they are read."""
        following = () if self.has_left else self._tape.operators[len(self.operators) :]
        operator = next((operator for operator in following if operator.target is not TO_COPY), None)
        return operator if operator is not None and operator.target == FunctionTarget(function) else None

    def _run_as(
        self, expected: TapeOperator, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]
    ) -> Any:
        try:
            parts = taken_apart(args)
        except NotReplayableError:
            self._leave()
            return run()
        call = call_of(function, parts)
        recorded = map_tensors(parts, torch.Tensor, self.refer)
        self._compare()
        said = expected.kwargs["call"]
        if self.has_left or not call.is_like(said) or repr(recorded) != repr(expected.args):
            self._leave()
            return run()
        changed = {old for old, _ in expected.mutations}
        given = {self.refer(leaf).value: leaf for leaf in leaves(parts) if isinstance(leaf, torch.Tensor)}
        written = [given[old] for old in changed]
        states, saved = self._generator_states(), list[torch.Tensor]()
        self._later, self._saved_inside = [], saved
        try:
            with self.paused():
                result = run()
        finally:
            later, self._later = self._later, None
        drew = self._have_moved(states)
        try:
            results = results_of(result)
        except NotReplayableError:
            self._leave()
        else:
            target = FunctionTarget(function)
            call = call._replace(data=said.data, results=results)
            self._note_function(target, recorded, call, flattened(result, saved), written, drew)
            self._compare()
        for note in later:
            note()
        return result

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_paused:
            return func(*args, **kwargs)
        result = super()._dispatch(func, types, args, kwargs)
        self._compare()
        return result

    def _before_it_runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._compare()
        if may_write(func) and not self.has_left:
            index = len(self.operators)
            expected = self._tape.operators[index] if index < len(self._tape.operators) else None
            if expected is None or (func, repr((args, kwargs))) != (expected.target, expected.arguments()):
                self._leave()

    def _compare(self) -> None:
        """Compare what was noted since the last time."""
        values, operators = len(self.values), len(self.operators)
        if self.has_left or (values, operators) == (self._num_values, self._num_operators):
            return
        fit = values <= len(self._tape.values) and operators <= len(self._tape.operators)
        fit = fit and all(map(_same_value, self.values[self._num_values :], self._tape.values[self._num_values :]))
        known = self._tape.operators[self._num_operators :]
        if fit and all(map(_same_operator, self.operators[self._num_operators :], known)):
            self._num_values, self._num_operators = values, operators
        else:
            self._leave()

    def _leave(self) -> None:
        if self.has_left:
            return
        self.has_left = True
        wanted, self._wanted = sorted(self._wanted.intersection(self._at_hand)), frozenset()
        with self.paused():
            self._on_leaving({value: self._at_hand[value] for value in wanted if value < self._num_values})

    def _keep(self, tensor: torch.Tensor, value: int, source: Source | None) -> None:
        self._addresses.append(StorageWeakRef(tensor.untyped_storage()))
        if source is not None and source.place == "generator":
            return  # the call has taken that state where it was
        if source is not None or value in self._wanted:
            self._at_hand[value] = tensor.detach()

    def kept(self) -> Iterable[tuple[int, torch.Tensor]]:
        return self._at_hand.items()


def _same_value(value: TapeValue, expected: TapeValue) -> bool:
    return (str(value.source), value.producer) == (str(expected.source), expected.producer)


def _same_operator(operator: TapeOperator, expected: TapeOperator) -> bool:
    """Whether two operators count as one in a tape's digest."""
    return (
        operator.target == expected.target
        and (operator.outputs, operator.mutations, operator.random, operator.generator)
        == (expected.outputs, expected.mutations, expected.random, expected.generator)
        and operator.arguments() == expected.arguments()
    )
