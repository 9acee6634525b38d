"""The check of a call at a size that never ran: whether its operators are given what its tape says (rule R7).

What autograd saves shows few of a tape's numbers. An argument that only replay reads, a stride or the dimension of a
sum, would change a gradient unseen. So at `family.AGREED` new sizes, and few after them, the first block that runs a
tape evaluated for one runs under a dispatch mode that looks at numbers alone: it keeps nothing, and takes some ten
microseconds an operator, a tenth of what recording takes. At some of them it also runs each operator that a replay may
run once more, as soon as it has run, and compares the bits of what it makes: that takes the memory of one operator's
results, not of all that the block makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.artifacts.errors import SavedOtherwiseError
from adacc_hf.tape.call_inputs import find_external
from adacc_hf.tape.function_operators import (
    FunctionTarget,
    NotReplayableError,
    begin_watching,
    call_of,
    end_watching,
    flattened,
    results_of,
    taken_apart,
)
from adacc_hf.tape.recorder import written_tensors
from adacc_hf.tape.replay import stand_in
from adacc_hf.tape.tape import (
    Blank,
    Tape,
    TapeOperator,
    TapeValue,
    TensorRef,
    geometry_of,
    has_storage,
    leaves,
    map_tensors,
)
from adacc_hf.tape.verification import same_bits
from adacc_hf.torch_glue.private import TO_COPY, DisableTorchDispatch, TorchDispatchMode, schema_of, storage_key
from adacc_hf.torch_glue.states import drawing_from, generator_state
from adacc_hf.torch_glue.tensors import copy_with_storage, is_plain, local_of, runs_on_parts

_CONSTANT = torch.ops.aten.lift_fresh.default
_DROPOUT = torch.ops.aten.native_dropout.default
_FULL = torch.ops.aten.full.default
_NOT_RUN = (_FULL, torch.ops.aten.native_dropout_backward.default)
"""Operators that a tape may have where none of that name runs: for a number out of Python, and for dropout's result."""


class SizeCheck(TorchDispatchMode):
    """While open, each operator is compared with that of a tape before it runs.

    The first one that is not the tape's raises SavedOtherwiseError. By then the call has done nothing but what its tape
    says.
    """

    def __init__(self, name: str, tape: Tape, compares: bool = False) -> None:
        """`compares` says whether replay is compared too: `unlike` has what it does not recompute."""
        super().__init__()
        self.compares = compares
        self.unlike: set[int] = set()
        self._recomputable = tape.recomputable
        self._name = name
        self._values = tape.values
        self._operators = tape.operators
        self._next = 0
        self._drawing = {num_saved: (value, device) for num_saved, value, device in tape.drawing() if compares}
        self._states: dict[int, torch.Tensor | None] = {}
        """What replay of the random operators would draw from."""
        self._num_saved = 0
        self._is_paused = self._is_in_function = False
        self._saved_inside: list[torch.Tensor] = []
        """The tensors that the Function which runs now has saved."""
        self._error: SavedOtherwiseError | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As `Recorder`."""
        return True

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare what the call is given and what hangs on its block with what the tape has for it."""
        self._take_state()
        for value in self._values:
            if value.source is None or value.source.place in ("unknown", "generator"):
                continue
            given = find_external(value.source, block, args, kwargs)
            if given is None or not _has_geometry(value.ref, local_of(given)):
                self._refuse(f"{value.source} is not as {value.ref}")

    def unseen(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """`pack`, with what it runs none of the block's operators."""

        def run(tensor: torch.Tensor) -> Any:
            self._num_saved += 1
            self._take_state()
            if self._is_in_function:
                self._saved_inside.append(tensor)
            if is_plain(tensor):  # as nearly all are: no operator of these comes to this mode
                with DisableTorchDispatch():
                    return pack(tensor)
            with self._paused():
                return pack(tensor)

        return run

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """While open, operators run that are not the tape's."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _take_state(self) -> None:
        """Take the generator's state where a plan does, so that the comparison draws from the same."""
        if self._num_saved in self._drawing:
            value, device = self._drawing[self._num_saved]
            self._states[value] = generator_state(device)

    def finish(self) -> None:
        """Raise SavedOtherwiseError if less ran than the tape has, or something else, though the block went on."""
        if self._error is not None:
            raise self._error
        missing = next((op for op in self._operators[self._next :] if not self._may_be_missing(op)), None)
        if missing is not None:
            self._refuse(f"{missing.name} does not run")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if types and any(map(runs_on_parts, types)):
            return NotImplemented  # what it runs on the parts comes here next
        if func is _CONSTANT:
            self._check_constant(args[0])
        if func.is_view:  # half of all
            return func(*args, **kwargs)
        expected = self._take(func, args, kwargs)
        if expected is None:
            return self._unexpected(func, args, kwargs)
        again = None
        if self.compares and expected.may_run_again and not self._recomputable.isdisjoint(expected.made()):
            again = _copied(func, args, kwargs, expected)  # before what it writes to is written
        result = func(*args, **kwargs)
        made = _as_leaves(result)
        for position, value in expected.outputs:
            if not _is_as(self._values[value], local_of(made[position])):
                self._refuse(f"{func} makes another tensor than {self._values[value].ref}")
        if again is not None:
            self._compare(expected, made, written_tensors(func, args, kwargs), func, *again)
        if self.compares and func is _DROPOUT:
            self._compare_dropout(args[0], made)
        return result

    def _run_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run an `autograd.Function`, compared with the tape's next operator if that is one."""
        if self._is_paused or self._is_in_function:
            return run()
        expected = self._next_function(function)
        self._is_in_function, self._saved_inside = True, []
        try:
            return run() if expected is None else self._run_as(expected, function, args, run)
        finally:
            self._is_in_function, self._saved_inside = False, []

    def _next_function(self, function: type[Function]) -> TapeOperator | None:
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            if operator.target == FunctionTarget(function):
                self._next = place + 1
                return operator
            if not self._may_be_missing(operator):
                break
        return None

    def _run_as(
        self, operator: TapeOperator, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]
    ) -> Any:
        try:
            parts = taken_apart(args)
        except NotReplayableError as reason:
            self._refuse(f"{operator.name} {reason}")
        call, expected = call_of(function, parts), operator.kwargs["call"]
        if not _same(operator.args, parts) or not call.is_like(expected):
            self._refuse(f"{operator.name} is given others than {operator.args}")
        is_compared = self.compares and operator.may_run_again and not self._recomputable.isdisjoint(operator.made())
        written = _written_by(operator, parts) if is_compared else {}
        with self._paused():
            copies = {key: copy_with_storage(tensor.detach()) for key, tensor in written.items()}
            result = run()
            made = flattened(result, self._saved_inside)
        for position, value in operator.outputs:
            made_one = made[position] if position < len(made) else None
            if not isinstance(made_one, torch.Tensor) or not _is_as(self._values[value], local_of(made_one)):
                self._refuse(f"{operator.name} makes another tensor than {self._values[value].ref}")
        try:
            if not _same(expected.results, results_of(result)):
                self._refuse(f"{operator.name} returns others than {expected.results}")
        except NotReplayableError as reason:
            self._refuse(f"{operator.name} {reason}")
        if is_compared:
            self._compare_function(operator, parts, made, written, copies)
        return result

    def _compare_function(
        self,
        operator: TapeOperator,
        parts: tuple[Any, ...],
        made: tuple[Any, ...],
        written: dict[int, torch.Tensor],
        copies: dict[int, torch.Tensor],
    ) -> None:
        """Run a Function's forward once more, and note what of its results comes out otherwise."""

        def given(tensor: torch.Tensor) -> torch.Tensor:
            copy = copies.get(storage_key(tensor.untyped_storage()))
            return tensor if copy is None else copy.as_strided(*geometry_of(tensor))

        state = None if operator.generator is None else self._states.pop(operator.generator)
        device = self._values[operator.made()[0]].device
        drawing = nullcontext() if state is None else drawing_from(state, device)
        with self._paused(), torch.no_grad(), drawing:
            others = operator.target(*map_tensors(parts, torch.Tensor, given), call=operator.kwargs["call"])
            pairs = [(value, made[position], others[position]) for position, value in operator.outputs]
            changed = [
                (new, written[key], copies[key]) for (_, new), key in zip(operator.mutations, written, strict=True)
            ]
            self.unlike |= {
                value
                for value, one, other in [*pairs, *changed]
                if value in self._recomputable and not same_bits(one.detach(), other)
            }

    def _compare(
        self, operator: TapeOperator, made: Any, written: list[torch.Tensor], func: Any, args: Any, kwargs: Any
    ) -> None:
        """Run an operator once more, and note what of its results comes out otherwise.

        Of those that replay makes: what cuDNN's attention leaves unwritten, its seed without dropout, never comes out
        as it was.
        """
        state = None if operator.generator is None else self._states.pop(operator.generator)
        device = self._values[operator.made()[0]].device
        with nullcontext() if state is None else drawing_from(state, device):
            others = _as_leaves(func(*args, **kwargs))
        # What `empty` makes has no bits to compare until something is written to it.
        outputs = [] if "empty" in operator.short_name else operator.outputs
        pairs = [(value, made[position], others[position]) for position, value in outputs]
        copies = written_tensors(func, args, kwargs)
        pairs += [(new, one, other) for (_, new), one, other in zip(operator.mutations, written, copies, strict=True)]
        self.unlike |= {
            value
            for value, one, other in pairs
            if value in self._recomputable and not same_bits(local_of(one), local_of(other))
        }

    def _compare_dropout(self, given: torch.Tensor, made: Any) -> None:
        """Compare the product that replay makes of dropout's mask with dropout's own result (rule R5)."""
        product = self._operators[self._next]
        if self._recomputable.isdisjoint(product.made()):
            return
        again = product.target(given, made[1], product.args[2])
        if not same_bits(made[0], again):
            self.unlike.update(product.made())

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapeOperator | None:
        """The tape's next operator, if it is this one and of the same numbers."""
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            may_be_missing = self._may_be_missing(operator)
            if operator.target is func:
                if _same(operator.args, args) and _same(operator.kwargs, kwargs):
                    self._next = place + 1
                    return operator
                if not may_be_missing and not _is_cast_of_parameter(func, args):
                    self._refuse(f"{func} is given others than {(operator.args, operator.kwargs)}")
            if not may_be_missing:
                return None
        return None

    def _may_be_missing(self, operator: TapeOperator) -> bool:
        """Whether no operator may run in its place: autocast keeps casts of parameters, which are noted as they are
        read."""
        if operator.target is TO_COPY:
            source = self._values[operator.args[0].value].source
            return source is not None and source.place == "parameter"
        return operator.target in _NOT_RUN

    def _check_constant(self, tensor: torch.Tensor) -> None:
        """Compare a number out of Python with the one that the tape makes next, if it makes any."""
        operator = self._operators[self._next] if self._next < len(self._operators) else None
        if operator is None or operator.target is not _FULL or tensor.numel() != 1 or tensor.is_meta:
            return
        is_at_hand = tensor.device.type == "cpu"  # a step waits for no device (rule R10)
        if is_at_hand and not _same(operator.args, (list(tensor.shape), tensor.item())):
            self._refuse(f"a number is not as in {operator.args}")
        self._next += 1

    def _unexpected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what the tape does not have next: it must not make or change a storage."""
        if schema_of(func).is_mutable:
            self._refuse(f"{func} runs, which it has not")
        result = func(*args, **kwargs)
        if _is_cast_of_parameter(func, args):
            return result
        known = {storage_key(tensor.untyped_storage()) for tensor in _stored(args, kwargs)}
        if any(storage_key(tensor.untyped_storage()) not in known for tensor in _stored(result)):
            self._refuse(f"{func} runs, which it has not")
        return result

    def _refuse(self, how: str) -> None:
        self._error = SavedOtherwiseError(f"block {self._name} does not run as its tape says: {how}")
        raise self._error


def _written_by(operator: TapeOperator, parts: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """The arguments of a Function that it writes into, by storage, in the order of the operator's mutations."""
    pairs = zip(leaves(operator.args), leaves(parts), strict=True)
    given = {ref.value: tensor for ref, tensor in pairs if isinstance(ref, TensorRef)}
    return {storage_key(given[old].untyped_storage()): given[old] for old, _ in operator.mutations}


def _as_leaves(result: Any) -> Any:
    return (result,) if isinstance(result, torch.Tensor) else leaves(result)


def _copied(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operator: TapeOperator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator with a copy of each tensor that it writes to, and what replay has for those of which
    it reads no element."""
    given = zip(args, operator.args, strict=True)
    args = tuple([stand_in(blank, blank.device) if isinstance(blank, Blank) else each for each, blank in given])
    copies = {id(tensor): copy_with_storage(tensor) for tensor in written_tensors(func, args, kwargs)}
    return map_tensors((args, kwargs), torch.Tensor, lambda tensor: copies.get(id(tensor), tensor))


def _is_cast_of_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    return func is TO_COPY and isinstance(args[0], nn.Parameter)


def _same(expected: Any, given: Any) -> bool:
    """Whether an operator is given the numbers that its tape has for it."""
    if expected is given:
        return True
    if isinstance(expected, (TensorRef, Blank)):
        return isinstance(given, torch.Tensor) and _has_geometry(expected, given)
    if isinstance(expected, (tuple, list)):
        if not isinstance(given, (tuple, list)) or len(expected) != len(given):
            return False
        return all(map(_same, expected, given))
    if isinstance(expected, dict):
        return expected.keys() == given.keys() and all(_same(item, given[name]) for name, item in expected.items())
    return expected == given or repr(expected) == repr(given)  # a number may be none


def _stored(*trees: Any) -> list[torch.Tensor]:
    """The tensors that have memory."""
    tensors = [leaf for leaf in leaves(*trees) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta and has_storage(tensor)]


def _is_as(expected: TapeValue, made: torch.Tensor) -> bool:
    return _has_geometry(expected.ref, made) and made.untyped_storage().nbytes() == expected.nbytes


def _has_geometry(ref: TensorRef | Blank, tensor: torch.Tensor) -> bool:
    size, stride, offset = ref.geometry
    return (
        tensor.dtype is ref.dtype
        and tensor.shape == size
        and tensor.stride() == stride
        and tensor.storage_offset() == offset
    )
