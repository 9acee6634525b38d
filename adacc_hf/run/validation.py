"""Validation of a block's call: the call must run the operators on the tape, with equal arguments (rule R8), and replay
must give the call's bits (rule R7).

The saved tensors alone do not show that a call matches its tape. A different stride, a different dimension of a sum, or
a different argument that only replay reads would change a gradient unnoticed. So some calls run under a
dispatch mode that compares each operator with the tape before the operator runs: the first call at a size, some later
calls, and every call of a block whose Python code cannot be traced (`tape/guards.py`). The mode keeps only the tensors
that the plan would store, and takes about 40 microseconds per operator.

At some new sizes, each operator that a replay may run is run once more immediately, and the bits are compared. The
comparison takes the memory of one operator's results, not of all intermediates of the block.
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
    call_of,
    decompose_arguments,
    flatten_results,
    is_one_operator,
    on_copies,
    results_of,
)
from adacc_hf.tape.operator_effects import written_tensors
from adacc_hf.tape.replay import stand_in
from adacc_hf.tape.replay_check import same_bits
from adacc_hf.tape.tape import Blank, TapeOperator, TensorRef, has_storage, leaves, map_tensors
from adacc_hf.torch_glue.function_calls import ForwardCall, begin_watching, end_watching
from adacc_hf.torch_glue.private import TorchDispatchMode, schema_of, storage_key
from adacc_hf.torch_glue.rng_state import draw_from_state, generator_state
from adacc_hf.torch_glue.tensors import copy_with_storage, is_fake, local_of, runs_on_parts

_CONSTANT = torch.ops.aten.lift_fresh.default
_DROPOUT = torch.ops.aten.native_dropout.default


class Validator(TorchDispatchMode):
    """Dispatch mode that compares each operator of a block's call, before it runs, with the tape's next operator.

    At the first difference, `on_divergence` gets the tensors that the plan stores and autograd has not saved yet, as a
    dict from value index to tensor. Later operators are not compared. Operators that the validator runs itself must run
    inside `paused`.
    """

    def __init__(
        self, plan: ExecutionPlan, checks_bits: bool, on_divergence: Callable[[Mapping[int, torch.Tensor]], None]
    ) -> None:
        """Initialize for the tape of `plan`. If `checks_bits` is True, operators run once more, to compare their
        results' bits."""
        super().__init__()
        tape = plan.tape
        self.mismatched_values: set[int] = set()
        """Indices of values that replay did not recompute bit for bit."""
        self._checks_bits = checks_bits
        self._recomputable = tape.recomputable
        self._position = TapePosition(tape, frozenset(plan.roots), on_divergence)
        self._states_to_store = {
            num_saved: (value, device) for num_saved, value, device in tape.generator_states() if checks_bits
        }
        self._states: dict[int, torch.Tensor | None] = {}
        """States of the random generator from which a replay of random operators would draw, by index of the state's
        value."""
        self._is_paused = False
        self._is_in_function = False
        """True while the validated call is inside an `autograd.Function` that is one operator of the tape."""

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because torch.compile's code inside a block must stay compiled under this mode."""
        return True

    @property
    def divergence(self) -> str | None:
        """Description of the first difference from the tape, or None."""
        return self._position.divergence

    @property
    def has_diverged(self) -> bool:
        return self._position.has_diverged

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the call's arguments, and the block's parameters, buffers and attached tensors, with the tape."""
        self._store_state()
        self._position.begin(block, args, kwargs)

    def saves(self, tensor: torch.Tensor) -> bool:
        """Compare the next tensor that autograd saves with the next saved tensor on the tape.

        Return True if they match.
        """
        if self.has_diverged:
            return False
        is_expected = self._position.saves(tensor)
        self._store_state()
        return is_expected

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the comparison of operators inside the `with` block, in which the validator itself runs operators."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> None:
        """Mark the call as diverged, unless all operators of the tape have run and all tensors on the tape were saved.

        Call this method after the block has returned.
        """
        self._position.finish()

    def _store_state(self) -> None:
        """Store the random generator's state if a call under the plan would store the state at this moment.

        If a random operator is run a second time, it draws from the stored state, as replay would.
        """
        if self._position.num_saved in self._states_to_store:
            value, device = self._states_to_store[self._position.num_saved]
            self._states[value] = generator_state(device)

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, position = kwargs or {}, self._position
        if self._is_paused or position.divergence is not None:
            return func(*args, **kwargs)
        if types and any(map(runs_on_parts, types)):
            return NotImplemented  # the operators on the local tensors are dispatched here next
        if func is _CONSTANT:
            position.take_number(args[0])
        if func.is_view:  # half of all operators
            position.note_cast(args[0])
            return func(*args, **kwargs)
        expected = position.take(func, args, kwargs)
        if expected is None:
            return self._run_unexpected(func, args, kwargs)
        repeat_arguments = None
        if self._is_compared(expected):
            repeat_arguments = _copied_arguments(func, args, kwargs, expected)  # before the operator writes to them
        result = func(*args, **kwargs)
        results, written = _result_leaves(result), written_tensors(func, args, kwargs)
        if not self._register_results(expected, results, written):
            return result
        if func is _DROPOUT and 0 not in dict(expected.outputs):
            self._derive_dropout(args[0], results)
        if repeat_arguments is not None:
            copied_args, copied_kwargs = repeat_arguments
            copies = written_tensors(func, copied_args, copied_kwargs)
            self._compare(
                expected, results, written, lambda: _result_leaves(func(*copied_args, **copied_kwargs)), copies
            )
        return result

    def _is_compared(self, operator: TapeOperator) -> bool:
        """Return True if the operator must be run once more, to compare the bits of its results, because replay may run
        it."""
        return self._checks_bits and operator.may_run_again and not self._recomputable.isdisjoint(operator.results())

    def _register_results(
        self, operator: TapeOperator, results: Sequence[Any], written: Sequence[torch.Tensor]
    ) -> bool:
        """Compare the results of an operator with the tape, and record which value of the tape each result is.

        `written` contains the tensors that the operator changed in place. If the tape has different results, mark the
        validated call as diverged and return False.
        """
        position = self._position
        if len(written) != len(operator.mutations):
            position.diverge(f"{operator.name} writes to different tensors")
            return False
        for place, value in operator.outputs:
            expected = position.values[value]
            tensor = (
                local_of(results[place]) if place < len(results) and isinstance(results[place], torch.Tensor) else None
            )
            has_expected_geometry = tensor is not None and has_geometry(expected.ref, tensor)
            if tensor is None or not has_expected_geometry or tensor.untyped_storage().nbytes() != expected.nbytes:
                position.diverge(f"{operator.name} makes a tensor that differs from {expected.ref}")
                return False
            position.own(value, tensor)
        for (_, value), tensor in zip(operator.mutations, written, strict=True):
            position.own(value, tensor)
        return True

    def _derive_dropout(self, input_tensor: torch.Tensor, results: Sequence[Any]) -> None:
        """Validate a dropout operator. The tape contains the product input * mask * scale instead, which replay runs.

        If this call compares the product's bits, compute the product from `input_tensor` and the mask, and compare the
        product with dropout's result. `results` contains the result of dropout and the mask.
        """
        product = self._position.take_dropout(input_tensor, results[0])
        if product is not None and self._is_compared(product):
            self._compare(
                product, results[:1], (), lambda: (product.target(input_tensor, results[1], product.args[2]),), ()
            )

    def _compare(
        self,
        operator: TapeOperator,
        results: Sequence[Any],
        written: Sequence[torch.Tensor],
        run_again: Callable[[], Sequence[Any]],
        copies: Sequence[torch.Tensor],
    ) -> None:
        """Run an operator of the validated call once more. If a value that replay recomputes has different bits, mark
        the call as diverged.

        `results` contains the tensors that the first run returned, and `written` contains the tensors that the first
        run changed in place. The second run changes `copies` instead of `written`. Values that replay does not
        recompute are not compared. For example, the seed of cuDNN's attention stays uninitialized without dropout.
        """
        state = None if operator.generator is None else self._states.pop(operator.generator)
        device = self._position.values[operator.results()[0]].device
        with self.paused(), torch.no_grad(), draw_from_state(state, device):
            second_results = run_again()
            # Uninitialized memory has no bits to compare.
            outputs = () if operator.allocates else operator.outputs
            pairs = [(value, results[place], second_results[place]) for place, value in outputs]
            mutations = zip(operator.mutations, written, copies, strict=True)
            pairs += [(new, first, second) for (_, new), first, second in mutations]
            self.mismatched_values |= {
                value
                for value, first, second in pairs
                if value in self._recomputable and not same_bits(local_of(first.detach()), local_of(second))
            }
        if self.mismatched_values:
            self._position.diverge(f"replay of {operator.name} gives different bits")

    def _run_unexpected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the validated call that is not next on the tape, and return the operator's result.

        If the operator changes a tensor or makes a new storage, the call diverges from the tape. A cast of a parameter
        is an exception: the result of a cast may be in a new storage.
        """
        position = self._position
        if schema_of(func).is_mutable and have_memory(args, kwargs):
            position.diverge(f"{func} runs, but is not next on the tape")
        result = func(*args, **kwargs)
        if position.has_diverged:
            return result
        known_storages = {storage_key(tensor.untyped_storage()) for tensor in _tensors_with_memory(args, kwargs)}
        new_storages = {
            storage_key(tensor.untyped_storage()) for tensor in _tensors_with_memory(result)
        } - known_storages
        for storage in new_storages:
            position.disown(storage)
        if new_storages and not is_cast_of_parameter(func, args):
            position.diverge(f"{func} runs, but is not next on the tape")
        return result

    # Functions that are one operator of the tape.

    def _run_function(self, forward_call: ForwardCall) -> Any:
        """Run an `autograd.Function` of the validated call and return the result.

        If the tape's next operator is this Function, compare the two calls of the Function. Else compare the operators
        inside the Function.
        """
        function, args = forward_call.function, forward_call.args
        if self._is_paused or self.has_diverged or self._is_in_function:
            return forward_call.run()
        expected = self._position.take_function(function)
        parts = None if expected is None else self._parts_of(expected, function, args)
        if expected is None or parts is None:  # compare the inner operators, or nothing after a divergence
            return forward_call.run()
        written = _written_by(expected, parts)
        is_compared = self._is_compared(expected)
        self._is_in_function = True
        try:
            with self.paused():
                copies = {key: copy_with_storage(t.detach()) for key, t in written.items()} if is_compared else {}
                result = forward_call.run()
        finally:
            self._is_in_function = False
        if self.has_diverged:  # operators inside the Function saved tensors
            return result
        results = flatten_results(result, forward_call.saved)
        call = expected.kwargs["call"]
        if self._register_results(expected, results, list(written.values())) and not self._returns(
            call.results, result
        ):
            self._position.diverge(f"{expected.name} returns results that differ from {call.results}")
        if is_compared and not self.has_diverged:

            def run_again() -> Sequence[Any]:
                return expected.target(*on_copies(parts, copies), call=call)

            self._compare(expected, results, list(written.values()), run_again, list(copies.values()))
        return result

    def _parts_of(self, operator: TapeOperator, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Return the arguments of an `autograd.Function`, decomposed into tensors and other objects.

        If the arguments differ from the arguments on the tape, mark the validated call as diverged and return None.
        """
        if is_one_operator(function):
            args = tuple(leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor))
        try:
            parts = decompose_arguments(args)
        except NotReplayableError as reason:
            self._position.diverge(f"{operator.name} {reason}")
            return None
        is_same = self._position.same(operator.args, parts)
        if not is_same or not call_of(function, parts).is_like(operator.kwargs["call"]):
            self._position.diverge(f"{operator.name} has arguments that differ from {operator.args}")
            return None
        return parts

    def _returns(self, expected: Any, result: Any) -> bool:
        """Return True if the non-tensor results of an `autograd.Function` equal `expected`, the results on the tape."""
        try:
            return self._position.same(expected, results_of(result))
        except NotReplayableError:
            return False


def _written_by(operator: TapeOperator, parts: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """Return the tensors that an `autograd.Function` writes to, by storage key, in the order in which the tape lists
    them."""
    pairs = zip(leaves(operator.args), leaves(parts), strict=True)
    tensors_by_value = {ref.value: tensor for ref, tensor in pairs if isinstance(ref, TensorRef)}
    return {
        storage_key(tensors_by_value[old].untyped_storage()): tensors_by_value[old] for old, _ in operator.mutations
    }


def _result_leaves(result: Any) -> Any:
    return (result,) if isinstance(result, torch.Tensor) else leaves(result)


def _copied_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: TapeOperator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for a second run of an operator, as replay would run it.

    Tensors that the operator writes to are copied. Tensors whose elements the operator does not read are replaced by
    uninitialized tensors.
    """
    pairs = zip(args, operator.args, strict=True)
    args = tuple([stand_in(blank, blank.device) if isinstance(blank, Blank) else argument for argument, blank in pairs])
    copies = {id(tensor): copy_with_storage(tensor) for tensor in written_tensors(func, args, kwargs)}
    return map_tensors((args, kwargs), torch.Tensor, lambda tensor: copies.get(id(tensor), tensor))


def _tensors_with_memory(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors of a validated call's `trees` that own memory. A DTensor is represented by its local part."""
    tensors = [local_of(leaf) for leaf in leaves(*trees) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta and not is_fake(tensor) and has_storage(tensor)]
