"""Validation of a call: does it run the operators that its tape has, with the same numbers and wiring? (rules R7, R8)

What autograd saves shows few of a tape's numbers. An argument that only replay reads, a stride or the dimension of a
sum, would change a gradient unseen. So calls that nothing vouches for yet run under a dispatch mode that compares each
operator with the tape before it runs: the first call at a size, some later ones, and every call of a block whose Python
cannot be traced (`tape/guards.py`). The mode keeps no tensor but those that the plan would store, and takes some ten
microseconds an operator.

At some new sizes each operator that a replay may run is run once more, as soon as it has run, and the bits are
compared. That takes the memory of one operator's results, not of all that the block makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.run.tape_position import TapePosition, has_geometry, have_memory, is_cast_of_parameter
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.function_operators import (
    NotReplayableError,
    begin_watching,
    call_of,
    end_watching,
    flattened,
    on_copies,
    results_of,
    taken_apart,
)
from adacc_hf.tape.recorder import written_tensors
from adacc_hf.tape.replay import stand_in
from adacc_hf.tape.replay_check import same_bits
from adacc_hf.tape.tape import Blank, TapeOperator, TensorRef, has_storage, leaves, map_tensors
from adacc_hf.torch_glue.private import TorchDispatchMode, schema_of, storage_key
from adacc_hf.torch_glue.rng_state import drawing_from, generator_state
from adacc_hf.torch_glue.tensors import copy_with_storage, is_fake, local_of, runs_on_parts

_CONSTANT = torch.ops.aten.lift_fresh.default
_DROPOUT = torch.ops.aten.native_dropout.default


class Validator(TorchDispatchMode):
    """Dispatch mode that compares each operator of a call with that of a tape before it runs.

    At the first difference `on_leaving` is called with the tensors, by value, that the plan would store and that were
    not saved yet; nothing is compared from then on. Operators that it runs need a pause (`paused`).
    """

    def __init__(
        self, plan: ExecutionPlan, compares: bool, on_leaving: Callable[[Mapping[int, torch.Tensor]], None]
    ) -> None:
        """If `compares`, operators are run once more, to compare the bits of replay."""
        super().__init__()
        tape = plan.tape
        self.unlike: set[int] = set()
        """Values that replay did not recompute bit for bit."""
        self._compares = compares
        self._recomputable = tape.recomputable
        self._position = TapePosition(tape, frozenset(plan.roots), on_leaving)
        self._drawing = {num_saved: (value, device) for num_saved, value, device in tape.drawing() if compares}
        self._states: dict[int, torch.Tensor | None] = {}
        """Generator states that replay of the random operators would draw from."""
        self._is_paused = False
        self.is_in_function = False
        """Whether the call is within a Function that is one operator of the tape."""
        self.saved_inside: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
        """The tensors that this Function has saved, each with the function that packs it after the comparison."""

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code inside a block compiled, as `Recorder` does."""
        return True

    @property
    def why_left(self) -> str | None:
        """The difference at which the call left the tape; None if it did not."""
        return self._position.why_left

    @property
    def has_left(self) -> bool:
        return self._position.has_left

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the arguments of a call, and the tensors that hang on its block, with those of the tape."""
        self._take_state()
        self._position.begin(block, args, kwargs)

    def saves(self, tensor: torch.Tensor) -> bool:
        """Compare the next tensor that autograd saves with the tape; return True if it is the tape's."""
        if self.has_left:
            return False
        is_expected = self._position.saves(tensor)
        self._take_state()
        return is_expected

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, operators run without being compared: they are not the block's."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> None:
        """Compare how much ran. Call it after the block."""
        self._position.finish()

    def _take_state(self) -> None:
        """Take the generator's state where a plan does, so that the comparison draws from the same state."""
        if self._position.num_saved in self._drawing:
            value, device = self._drawing[self._position.num_saved]
            self._states[value] = generator_state(device)

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, position = kwargs or {}, self._position
        if self._is_paused or position.why_left is not None:
            return func(*args, **kwargs)
        if types and any(map(runs_on_parts, types)):
            return NotImplemented  # what it runs on the parts comes here next
        if func is _CONSTANT:
            position.take_number(args[0])
        if func.is_view:  # half of all
            position.note_cast(args[0])
            return func(*args, **kwargs)
        expected = position.take(func, args, kwargs)
        if expected is None:
            return self._run_unexpected(func, args, kwargs)
        again = None
        if self._is_compared(expected):
            again = _copied(func, args, kwargs, expected)  # before what it writes to is written
        result = func(*args, **kwargs)
        made, written = _as_leaves(result), written_tensors(func, args, kwargs)
        if not self._own_made(expected, made, written):
            return result
        if func is _DROPOUT and 0 not in dict(expected.outputs):
            self._derive_dropout(args[0], made)
        if again is not None:
            copied_args, copied_kwargs = again
            copies = written_tensors(func, copied_args, copied_kwargs)
            self._compare(expected, made, written, lambda: _as_leaves(func(*copied_args, **copied_kwargs)), copies)
        return result

    def _is_compared(self, operator: TapeOperator) -> bool:
        """Return True if the operator is run once more, since replay may run it."""
        return self._compares and operator.may_run_again and not self._recomputable.isdisjoint(operator.made())

    def _own_made(self, operator: TapeOperator, made: Sequence[Any], written: Sequence[torch.Tensor]) -> bool:
        """Note the values that an operator has made. If the tape has others, leave it and return False."""
        position = self._position
        if len(written) != len(operator.mutations):
            position.leave(f"{operator.name} writes to other tensors")
            return False
        for place, value in operator.outputs:
            expected = position.values[value]
            tensor = local_of(made[place]) if place < len(made) and isinstance(made[place], torch.Tensor) else None
            is_as = tensor is not None and has_geometry(expected.ref, tensor)
            if tensor is None or not is_as or tensor.untyped_storage().nbytes() != expected.nbytes:
                position.leave(f"{operator.name} makes another tensor than {expected.ref}")
                return False
            position.own(value, tensor)
        for (_, value), tensor in zip(operator.mutations, written, strict=True):
            position.own(value, tensor)
        return True

    def _derive_dropout(self, given: torch.Tensor, made: Sequence[Any]) -> None:
        """Compare dropout's result with the product that replay makes it by."""
        product = self._position.take_dropout(given, made[0])
        if product is not None and self._is_compared(product):
            self._compare(product, made[:1], (), lambda: (product.target(given, made[1], product.args[2]),), ())

    def _compare(
        self,
        operator: TapeOperator,
        made: Sequence[Any],
        written: Sequence[torch.Tensor],
        run_again: Callable[[], Sequence[Any]],
        copies: Sequence[torch.Tensor],
    ) -> None:
        """Run an operator once more, and leave the tape if a value that replay makes comes out with other bits.

        Only these values: the seed that cuDNN's attention leaves unwritten without dropout never has the same bits.
        `copies` are the tensors that the second run writes into.
        """
        state = None if operator.generator is None else self._states.pop(operator.generator)
        device = self._position.values[operator.made()[0]].device
        with self.paused(), torch.no_grad(), drawing_from(state, device):
            others = run_again()
            # Memory that was only allocated has no bits to compare until something is written to it.
            outputs = () if operator.allocates else operator.outputs
            pairs = [(value, made[place], others[place]) for place, value in outputs]
            mutations = zip(operator.mutations, written, copies, strict=True)
            pairs += [(new, one, other) for (_, new), one, other in mutations]
            self.unlike |= {
                value
                for value, one, other in pairs
                if value in self._recomputable and not same_bits(local_of(one.detach()), local_of(other))
            }
        if self.unlike:
            self._position.leave(f"replay of {operator.name} does not give the same bits")

    def _run_unexpected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that the tape does not have next. It may make or change no storage of the block's."""
        position = self._position
        if schema_of(func).is_mutable and have_memory(args, kwargs):
            position.leave(f"{func} runs, which it has not")
        result = func(*args, **kwargs)
        if position.has_left:
            return result
        known = {storage_key(tensor.untyped_storage()) for tensor in _stored(args, kwargs)}
        new = {storage_key(tensor.untyped_storage()) for tensor in _stored(result)} - known
        for storage in new:
            position.disown(storage)
        if new and not is_cast_of_parameter(func, args):
            position.leave(f"{func} runs, which it has not")
        return result

    # Functions that are one operator.

    def _run_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run an `autograd.Function`, compared with the tape's next operator if that is one."""
        if self._is_paused or self.has_left or self.is_in_function:
            return run()
        expected = self._position.take_function(function)
        parts = None if expected is None else self._parts_of(expected, function, args)
        if expected is None or parts is None:  # its operators are compared, or everything is kept
            return run()
        written = _written_by(expected, parts)
        is_compared = self._is_compared(expected)
        self.is_in_function = True
        try:
            with self.paused():
                copies = {key: copy_with_storage(t.detach()) for key, t in written.items()} if is_compared else {}
                result = run()
        finally:
            self.is_in_function = False
            saved, self.saved_inside = self.saved_inside, []
        made = flattened(result, [tensor for tensor, _ in saved])
        call = expected.kwargs["call"]
        if self._own_made(expected, made, list(written.values())) and not self._returns(call.results, result):
            self._position.leave(f"{expected.name} returns others than {call.results}")
        if is_compared and not self.has_left:

            def run_again() -> Sequence[Any]:
                return expected.target(*on_copies(parts, copies), call=call)

            self._compare(expected, made, list(written.values()), run_again, list(copies.values()))
        for tensor, pack in saved:
            pack(tensor)
        return result

    def _parts_of(self, operator: TapeOperator, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Return a Function's arguments taken apart. If the tape has others, leave it and return None."""
        try:
            parts = taken_apart(args)
        except NotReplayableError as reason:
            self._position.leave(f"{operator.name} {reason}")
            return None
        is_same = self._position.same(operator.args, parts)
        if not is_same or not call_of(function, parts).is_like(operator.kwargs["call"]):
            self._position.leave(f"{operator.name} is given others than {operator.args}")
            return None
        return parts

    def _returns(self, expected: Any, result: Any) -> bool:
        """Return True if a Function returned, apart from its tensors, what its tape has."""
        try:
            return self._position.same(expected, results_of(result))
        except NotReplayableError:
            return False


def _written_by(operator: TapeOperator, parts: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """Return the arguments of a Function that it writes into, by storage, in the order of the operator's mutations."""
    pairs = zip(leaves(operator.args), leaves(parts), strict=True)
    given = {ref.value: tensor for ref, tensor in pairs if isinstance(ref, TensorRef)}
    return {storage_key(given[old].untyped_storage()): given[old] for old, _ in operator.mutations}


def _as_leaves(result: Any) -> Any:
    return (result,) if isinstance(result, torch.Tensor) else leaves(result)


def _copied(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: TapeOperator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator as replay gives them: copies of the tensors that it writes to, stand-ins for
    those of which it reads no element."""
    given = zip(args, operator.args, strict=True)
    args = tuple([stand_in(blank, blank.device) if isinstance(blank, Blank) else each for each, blank in given])
    copies = {id(tensor): copy_with_storage(tensor) for tensor in written_tensors(func, args, kwargs)}
    return map_tensors((args, kwargs), torch.Tensor, lambda tensor: copies.get(id(tensor), tensor))


def _stored(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors that have memory. DTensors are represented by their local parts."""
    tensors = [local_of(leaf) for leaf in leaves(*trees) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta and not is_fake(tensor) and has_storage(tensor)]
