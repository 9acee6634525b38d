"""Recording an `autograd.Function` as one operator, where the operators inside it do not tell what it makes.

NOTE [When a Function is one operator]
A Function is first recorded by the operators that its forward runs. If these recompute all that it returns and saves,
they stay on the tape: replay runs only the operators that a saved tensor needs. If they do not (a kernel fills memory
unseen, or data is read into Python), the Function becomes one operator, whose target is the class, and replay runs its
whole forward again. Both are compared with the original bit for bit (rule R7).

A Function whose forward cannot be run again for the same result keeps its operators, and what these do not recompute is
stored. `refused` has the reason: the Function writes into an input of the block or a parameter, marks arguments as
dirty, reads tensors that are not among its arguments, changes Python values, or is given objects that cannot be made
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import Function

from adacc_hf.tape.data_reads import Read
from adacc_hf.tape.function_operators import (
    FunctionCall,
    FunctionTarget,
    NotReplayableError,
    Surroundings,
    autocast_as,
    begin_watching,
    call_of,
    end_watching,
    flattened,
    on_copies,
    results_of,
    taken_apart,
)
from adacc_hf.tape.replay import closure
from adacc_hf.tape.replay_check import replayed_alike, same_bits
from adacc_hf.tape.tape import Tape, TapeOperator, TapeValue, TensorRef, geometry_of, has_storage, leaves, map_tensors
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.rng_state import drawing_from, generator_state, random_states_kept
from adacc_hf.torch_glue.tensors import copy_with_storage, fingerprint, is_plain, local_of, wraps_others

WRITES = "writes into its arguments"


@dataclass
class _Mark:
    """The state of a recorder before a Function runs."""

    num_values: int
    num_operators: int
    num_slots: int
    num_reads: int
    overwritten: list[bool]
    written: dict[int, TensorRef]
    current: dict[int, int]
    untrusted: str | None
    generator_state: torch.Tensor | None


@dataclass
class _Ran:
    """A Function that has run while its operators were recorded."""

    function: type[Function]
    args: tuple[Any, ...]
    """Its arguments, taken apart."""
    call: FunctionCall
    result: Any
    saved: list[torch.Tensor]
    before: _Mark
    state: torch.Tensor | None
    """The state of the default generator of the block's device when the Function began."""
    written: list[torch.Tensor]
    """Arguments whose bits have changed, one per storage."""
    drew: bool

    @property
    def returned(self) -> tuple[Any, ...]:
        return flattened(self.result, self.saved)


class FunctionRecorder:
    """The part of a recorder that records the Functions of a block. The attributes below are the recorder's."""

    values: list[TapeValue]
    bases: list[torch.Tensor]
    operators: list[TapeOperator]
    slots: list[TensorRef]
    untrusted: str | None
    reads: list[Read]
    _storages: list[int]
    _written: dict[int, TensorRef]
    _current: dict[int, int]
    _externals: dict[int, Any]
    _generator_state: torch.Tensor | None
    _device: torch.device
    _in_operator: bool
    _is_fake: bool
    _modules: list[str]
    refer: Callable[[torch.Tensor], TensorRef]
    _unsealed: Callable[[], Tape]
    _make: Callable[[torch.Tensor, int, str], int]
    _next_version: Callable[[torch.Tensor, int, str], tuple[int, int]]
    _state_before: Callable[[TapeOperator, str], int | None]
    _is_known: Callable[[torch.Tensor], bool]
    _save: Callable[[torch.Tensor], None]

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        """The reason why a Function could not become one operator, by the Function's name."""
        self.function_slots: set[int] = set()
        """Slots that Functions have saved."""
        self._is_paused = False
        self._is_in_function = False
        self._saved_inside: list[torch.Tensor] = []
        """The tensors that the Function which runs now has saved."""
        self._read_inside: set[int] | None = None
        """Storages that operators read while the recorder is paused; None if they are not noted."""

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()  # type: ignore[misc]  # a dispatch mode comes next in line

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)  # type: ignore[misc]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, operators run without being recorded, and reads are not noted: they are not the block's."""
        before = self._is_paused, self._in_operator
        self._is_paused = self._in_operator = True
        try:
            yield
        finally:
            self._is_paused, self._in_operator = before

    @contextmanager
    def _inside_function(self) -> Iterator[None]:
        """While open, inner Functions are a part of the one that runs, and saved tensors are that one's."""
        self._is_in_function, self._saved_inside = True, []
        try:
            yield
        finally:
            self._is_in_function = False

    def _run_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a Function and note which slots it saves."""
        num_slots = len(self.slots)
        result = self._record_function(function, args, run)
        self.function_slots.update(range(num_slots, len(self.slots)))
        return result

    def _record_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run a Function and record its operators. If they do not recompute what it made, put one in their place."""
        if self._is_in_function or self._is_paused or self._in_operator or self._is_fake:
            return run()
        if not all(map(is_plain, _tensors(args))):  # parts of DTensors, on which other operators run
            with self._inside_function():
                return run()
        parts, reason = _parts_of(args)
        before, states = self._mark(), self._generator_states()
        given = {storage_key(t.untyped_storage()): t for t in _tensors(args if parts is None else parts)}
        call = None if parts is None else call_of(function, parts)
        with self.paused():
            prints = {key: fingerprint(tensor) for key, tensor in given.items()}
        with self._inside_function():
            result = run()
        with self.paused(), torch.no_grad(), autocast_as(()):
            written = [tensor for key, tensor in given.items() if fingerprint(tensor) != prints[key]]
            drew = self._have_moved(states)
            returned = flattened(result, self._saved_inside)
            # Tensors that consist of others have no bits of their own to compare (float8 training).
            is_wrapped = any(map(wraps_others, self.bases[before.num_values :]))
            alike = None if is_wrapped else self._recomputed_inside(before, returned, written)
        if alike is not None:
            try:
                if parts is None or call is None:
                    raise NotReplayableError(reason)
                ran = _Ran(function, parts, call, result, self._saved_inside, before, states[0], written, drew)
                self._replace(ran, alike)
            except NotReplayableError as why:
                self.refused[f"{function.__module__}.{function.__qualname__}"] = str(why)
        self._saved_inside = []
        return result

    def _recomputed_inside(
        self, before: _Mark, returned: tuple[Any, ...], written: list[torch.Tensor]
    ) -> frozenset[int] | None:
        """Return the values that the recorded operators of a Function recompute; None if these are all that it made."""
        made = [tensor for tensor in _tensors(returned) if self._is_made_after(before, tensor)]
        values = [self._current.get(storage_key(tensor.untyped_storage())) for tensor in made]
        inside = self.operators[before.num_operators :]
        changed = {old for operator in inside for old, _ in operator.mutations if self._is_outer(before, old)}
        needed = {value for value in values if value is not None}
        if changed:  # operators cannot run again on what they have overwritten
            alike = frozenset(needed - self._left_unwritten(inside))
        else:
            alike = replayed_alike(self._unsealed(), inside, before.num_values, self.bases)
        storages = {self._storages[value] for value in changed}
        has_hidden_write = any(storage_key(t.untyped_storage()) not in storages for t in written)
        has_view = any(map(_is_view, self.reads[before.num_reads :])) or self.untrusted != before.untrusted
        is_told = None not in values and needed <= alike and not has_hidden_write and not has_view
        return None if is_told else alike

    def _left_unwritten(self, operators: Sequence[TapeOperator]) -> set[int]:
        """Return the values of allocated memory that no operator has written."""
        made = {value for operator in operators if operator.allocates for _, value in operator.outputs}
        return {value for value in made if not self.values[value].overwritten and self.values[value].nbytes}

    def _replace(self, ran: _Ran, alike: frozenset[int]) -> None:
        """Put one operator in the place of those that a Function ran.

        Raises NotReplayableError, before anything is changed, if it would not recompute what the Function made.
        """
        results = results_of(ran.result)
        target = FunctionTarget(ran.function)
        data = self._data_read(ran, results)
        self._check_writes(ran)
        foreign = self._foreign_reads(ran)
        self._check_run_again(target, ran, alike, foreign)
        self._roll_back(ran.before)
        recorded = map_tensors(ran.args, torch.Tensor, self.refer)
        call = ran.call._replace(data=tuple(data), results=results)
        self._note_function(target, recorded, call, ran.returned, ran.written, ran.drew)
        for tensor in ran.saved:
            self._save(tensor)

    def _note_function(
        self,
        target: FunctionTarget,
        args: tuple[Any, ...],
        call: FunctionCall,
        returned: tuple[Any, ...],
        written: list[torch.Tensor],
        drew: bool,
    ) -> None:
        """Note a Function that has run as one operator."""
        index = len(self.operators)
        module = self._modules[-1] if self._modules else ""
        name = f"{module or 'block'}:{target.__name__}"
        mutations = tuple([self._next_version(tensor, index, name) for tensor in written])
        fresh = [
            (position, self._make(local_of(tensor), index, name))
            for position, tensor in enumerate(returned)
            if isinstance(tensor, torch.Tensor) and not self._is_known(local_of(tensor))
        ]
        if not fresh and not mutations:
            return
        operator = TapeOperator(index, target, args, {"call": call}, tuple(fresh), mutations, drew, module)
        operator.generator = self._state_before(operator, name) if drew else None
        self.operators.append(operator)
        self._generator_state = None if drew else self._generator_state
        given = [leaf.value for leaf in leaves(args) if isinstance(leaf, TensorRef)]
        self.reads += [Read(given[place], f"autograd.Function {target.__name__}") for place in call.data]

    # Checks. Each raises NotReplayableError with the reason.

    def _data_read(self, ran: _Ran, results: Any) -> list[int]:
        """Return the indices of the tensors among the arguments that the Function reads into Python.

        A numpy array does not count: like a kernel's pointer, it is a way to the memory, which replay takes again.
        Raises NotReplayableError if a Function that makes such an array also returns numbers, or if data is read that
        does not follow from the arguments.
        """
        reads = self.reads[ran.before.num_reads :]
        has_numbers = any(leaf is not None for leaf in leaves((results,)))
        if has_numbers and any(map(_is_view, reads)):
            raise NotReplayableError("returns what it may read from arrays of numpy")
        places = {storage_key(t.untyped_storage()): place for place, t in enumerate(_tensors(ran.args))}
        found: dict[int, None] = {}
        for read in reads:
            if _is_view(read):
                continue
            operators, ends = closure(self._unsealed(), read.value, lambda value: self._is_outer(ran.before, value))
            is_determined = all(self.operators[index].may_run_again for index in operators)
            if not is_determined or not all(self._storages[value] in places for value in ends):
                raise NotReplayableError("reads data into Python that is not that of its arguments")
            found |= dict.fromkeys(places[self._storages[value]] for value in ends)
        return list(found)

    def _check_writes(self, ran: _Ran) -> None:
        """Raise unless each tensor that the Function wrote into was made by the block, written unseen, and not saved.

        Its storage then gets a new version, as if an operator had written in place (rule R6).
        """
        before = ran.before
        inside = self.operators[before.num_operators :]
        if any(self._is_outer(before, old) for operator in inside for old, _ in operator.mutations):
            raise NotReplayableError(WRITES)
        saved = {self._storages[slot.value] for slot in self.slots[: before.num_slots]}
        for tensor in ran.written:
            key = storage_key(tensor.untyped_storage())
            value = before.current.get(key)
            if value is None or self.values[value].source is not None or key in saved:
                raise NotReplayableError(WRITES)

    def _foreign_reads(self, ran: _Ran) -> set[int]:
        """Return the storages of unknown origin that operators inside the Function read.

        Raises NotReplayableError if they read a tensor that is known to be no argument, or if an operator is a
        collective.
        """
        before, given = ran.before, {storage_key(t.untyped_storage()) for t in _tensors(ran.args)}
        foreign: set[int] = set()
        for operator in self.operators[before.num_operators :]:
            if operator.is_collective:
                raise NotReplayableError("runs operators that other ranks take part in")
            for value in operator.inputs():
                source = self.values[value].source
                is_inside = not self._is_outer(before, value) or self._storages[value] in given
                if is_inside or (source is not None and source.place == "generator"):
                    continue
                if source is None or source.place != "unknown":
                    raise NotReplayableError(f"reads {source or 'a tensor'} that is not among its arguments")
                foreign.add(self._storages[value])
        return foreign

    def _check_run_again(self, target: FunctionTarget, ran: _Ran, alike: frozenset[int], foreign: set[int]) -> None:
        """Run the Function's forward again, and raise unless it recomputes more than the operators inside it do."""
        around = Surroundings(ran.function)
        if around.has_tensors:
            raise NotReplayableError("can reach tensors that are not among its arguments, as globals or in a closure")
        if ran.drew and (ran.state is None or self._has_drawn_elsewhere(ran)):
            raise NotReplayableError("draws from a generator whose state was not kept")
        again, read = self._again(target, ran)
        if not read.isdisjoint(foreign):
            raise NotReplayableError("reads a tensor that is not among its arguments")
        changed = around.changed(Surroundings(ran.function))
        if changed is not None:
            raise NotReplayableError(f"changes {changed}, a value that outlives the call")
        returned = ran.returned
        if not ran.saved:  # called without gradients
            again = again[: len(returned)]
        if len(again) != len(returned):
            raise NotReplayableError("saves other tensors for backward when it runs again")
        gained = bool(ran.written)
        for one, other in zip(returned, again, strict=True):
            if not isinstance(one, torch.Tensor) or not self._is_made_after(ran.before, one):
                continue
            if not isinstance(other, torch.Tensor) or not _lies_like(one, other):
                raise NotReplayableError("makes other tensors when it runs again")
            if storage_key(one.untyped_storage()) == storage_key(other.untyped_storage()):
                raise NotReplayableError("returns a tensor that it keeps")
            with self.paused():
                is_alike = bool(ran.written) or same_bits(one, other)
            is_told = self._current.get(storage_key(one.untyped_storage())) in alike
            if is_told and not is_alike:
                raise NotReplayableError("does not make the same bits when it runs again")
            gained |= is_alike
        if not gained:
            raise NotReplayableError("does not make the same bits when it runs again")

    def _again(self, target: FunctionTarget, ran: _Ran) -> tuple[tuple[Any, ...], set[int]]:
        """Run the Function's forward again. Return what it makes, and the storages that operators inside it read."""
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        drawing = drawing_from(ran.state if ran.drew else None, self._device)
        with self.paused(), torch.no_grad(), hooks, random_states_kept([self._device]), drawing:
            copies = {storage_key(t.untyped_storage()): copy_with_storage(t.detach()) for t in ran.written}
            args = on_copies(ran.args, copies)
            read: set[int] = set()
            self._read_inside = read
            try:
                return target(*args, call=ran.call), read
            except torch.OutOfMemoryError:
                raise
            except NotReplayableError:
                raise
            except Exception as error:  # whatever the user's code raises
                raise NotReplayableError(f"cannot be run again ({type(error).__name__}: {error})") from None
            finally:
                self._read_inside = None

    def _note_paused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the storages that an operator reads while the recorder is paused."""
        if self._read_inside is not None:
            self._read_inside |= {storage_key(t.untyped_storage()) for t in _tensors((args, kwargs)) if has_storage(t)}

    # The recorder's state.

    def _is_made_after(self, before: _Mark, tensor: torch.Tensor) -> bool:
        if not is_plain(tensor) or not has_storage(tensor):
            return False
        key = storage_key(tensor.untyped_storage())
        return key not in before.current and key not in self._externals

    def _is_outer(self, before: _Mark, value: int) -> bool:
        """Return True for a value that was there before the Function ran, or that no operator has made."""
        return value < before.num_values or self.values[value].source is not None

    def _mark(self) -> _Mark:
        return _Mark(
            len(self.values),
            len(self.operators),
            len(self.slots),
            len(self.reads),
            [value.overwritten for value in self.values],
            dict(self._written),
            dict(self._current),
            self.untrusted,
            self._generator_state,
        )

    def _roll_back(self, mark: _Mark) -> None:
        """Forget what was recorded since `mark`."""
        del self.values[mark.num_values :], self.bases[mark.num_values :], self._storages[mark.num_values :]
        del self.operators[mark.num_operators :], self.slots[mark.num_slots :], self.reads[mark.num_reads :]
        for value, overwritten in zip(self.values, mark.overwritten, strict=True):
            value.overwritten = overwritten
        self._written, self._current = mark.written, mark.current
        self.untrusted, self._generator_state = mark.untrusted, mark.generator_state

    def _generator_states(self) -> list[torch.Tensor | None]:
        """Return the states of the default generators of the block's device and of the CPU."""
        return [generator_state(self._device), generator_state(torch.device("cpu"))]

    def _have_moved(self, before: list[torch.Tensor | None]) -> bool:
        pairs = zip(before, self._generator_states(), strict=True)
        with self.paused():
            return any(one is not None and other is not None and not torch.equal(one, other) for one, other in pairs)

    def _has_drawn_elsewhere(self, ran: _Ran) -> bool:
        """Return True if numbers were drawn since the generator's state was kept last, so that replay lacks a state."""
        kept = ran.before.generator_state
        with self.paused():
            return kept is None or ran.state is None or not torch.equal(kept, ran.state)


def _is_view(read: Read) -> bool:
    """Return True if a tensor became a numpy array, whose data Python need not have looked at."""
    return read.by == "Tensor.numpy"


def _parts_of(args: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, str]:
    """Return (the arguments of a Function taken apart, ""), or (None, the reason why that fails)."""
    try:
        return taken_apart(args), ""
    except NotReplayableError as reason:
        return None, str(reason)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves((tree,)) if isinstance(leaf, torch.Tensor)]


def _lies_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same geometry, dtype and size of storage."""
    return (geometry_of(one), one.dtype, one.untyped_storage().nbytes()) == (
        geometry_of(other),
        other.dtype,
        other.untyped_storage().nbytes(),
    )
