"""Validation of a call: does it run the operators that its tape has, with the same numbers and wiring? (rules R7, R8)

What autograd saves shows few of a tape's numbers. An argument that only replay reads, a stride or the dimension of a
sum, would change a gradient unseen. So calls that nothing vouches for yet run under a dispatch mode that compares each
operator with the tape before it runs: the first call at a size, some later ones, and every call of a block whose Python
cannot be traced (`tape/guards.py`). The mode keeps no tensor but what the plan would store, and takes some ten
microseconds an operator.

Where a call leaves its tape, everything from there on is kept. What was saved before is recomputed from what the tape
says of it: the call is exact all the same.

At some new sizes each operator that a replay may run is run once more, as soon as it has run, and the bits are
compared. That takes the memory of one operator's results, not of all that the block makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.kernels.codecs import Coder
from adacc_hf.run.call import Call, changed_in_place
from adacc_hf.tape.call_inputs import find_external
from adacc_hf.tape.compiled_plan import CompiledPlan
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
    COLLECTIVES,
    Blank,
    TapeOperator,
    TapeValue,
    TensorRef,
    geometry_of,
    has_storage,
    leaves,
    map_tensors,
)
from adacc_hf.tape.verification import same_bits
from adacc_hf.torch_glue.compat import cast_from
from adacc_hf.torch_glue.private import (
    TO_COPY,
    TorchDispatchMode,
    schema_of,
    storage_key,
    version_of,
)
from adacc_hf.torch_glue.states import drawing_from, generator_state
from adacc_hf.torch_glue.tensors import copy_with_storage, is_fake, local_of, runs_on_parts

_CONSTANT = torch.ops.aten.lift_fresh.default
_DROPOUT = torch.ops.aten.native_dropout.default
_DROPPED = torch.ops.aten.native_dropout_backward.default
_FULL = torch.ops.aten.full.default
_NOT_RUN = (_FULL, _DROPPED)
"""Operators that a tape may have where none of that name runs: for a number out of Python, and for dropout's result."""


class Kept:
    """What autograd holds for a tensor that no plan knows: the tensor as it was, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


class Deferred:
    """What autograd holds for a tensor that a Function saved, until the Function has returned and is compared."""

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed: Any = None


class ValidatedCall:
    """One call of a block under its plan, compared with the plan's tape on the way."""

    def __init__(
        self,
        name: str,
        plan: CompiledPlan,
        codecs: Mapping[int, Coder],
        externals: list[tuple[int, torch.Tensor]],
        compares: bool = False,
    ) -> None:
        """`compares` says whether the bits of replay are compared too."""
        self.name = name
        self.why_left: str | None = None
        """Where the call left the plan's tape; None if it did not."""
        self.unlike: frozenset[int] = frozenset()
        """Values that replay did not recompute bit for bit."""
        self._begin = partial(Call, plan, name, codecs, externals)
        self._call: Call | None = None
        """None where the call is given what the plan's tape was not."""
        self._validator = Validator(plan, compares, self._leave_tape)

    @property
    def seen(self) -> list[int] | None:
        """The list that the order of unpacks goes into; None if the call left the plan's tape."""
        return None if self._call is None or self.why_left is not None else self._call.seen

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `fn(*args)`."""
        validator = self._validator
        validator.begin(block, args, kwargs)
        if not validator.has_left:
            self._call = self._begin()
            self._call.seen = []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), validator:
            result = fn(*args)
        validator.finish()
        if self._call is not None and not validator.has_left:
            self._call.finish()
        self.why_left, self.unlike = validator.why_left, frozenset(validator.unlike)
        del self._validator, self._begin  # autograd holds this object, for the sake of `_unpack`
        return result

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._validator.is_in_function:
            return self._packed(tensor)
        deferred = Deferred()
        self._validator.saved_inside.append((tensor, partial(self._pack_deferred, deferred)))
        return deferred

    def _pack_deferred(self, deferred: Deferred, tensor: torch.Tensor) -> None:
        deferred.packed = self._packed(tensor)

    def _packed(self, tensor: torch.Tensor) -> Any:
        validator = self._validator
        if not validator.saves(tensor) or self._call is None:
            return Kept(tensor)
        with validator.paused():
            return self._call.pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Deferred):
            packed = packed.packed
        if not isinstance(packed, Kept):
            assert self._call is not None  # which has packed it
            return self._call.unpack(packed)
        if version_of(packed.tensor) != packed.version:
            raise changed_in_place(self.name, "a saved tensor")
        return packed.tensor

    def _leave_tape(self, values: Mapping[int, torch.Tensor]) -> None:
        if self._call is not None:
            self._call.leave_tape(values)


class Validator(TorchDispatchMode):
    """While open, each operator is compared with that of a tape before it runs.

    At the first difference `on_leaving` is called with the tensors, by value, that the plan would store and that were
    not saved yet; nothing is compared from then on.
    """

    def __init__(
        self, plan: CompiledPlan, compares: bool, on_leaving: Callable[[Mapping[int, torch.Tensor]], None]
    ) -> None:
        super().__init__()
        tape = plan.tape
        self.unlike: set[int] = set()
        self.why_left: str | None = None
        self._compares = compares
        self._on_leaving = on_leaving
        self._recomputable = tape.recomputable
        self._values, self._operators, self._slots = tape.values, tape.operators, tape.slots
        self._next = 0
        self._num_saved = 0
        self._wanted = frozenset(plan.roots)
        self._at_hand: dict[int, torch.Tensor] = {}
        self._owners: dict[int, int] = {}
        """The value that each storage holds now, by storage."""
        self._drawing = {num_saved: (value, device) for num_saved, value, device in tape.drawing() if compares}
        self._states: dict[int, torch.Tensor | None] = {}
        """What replay of the random operators would draw from."""
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        """Casts that autocast keeps, by the parameter and their type."""
        self._is_paused = False
        self.is_in_function = False
        """Whether a Function runs that is one operator of the tape."""
        self.saved_inside: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
        """The tensors that this Function has saved, each with what packs it once it was compared."""

    def __enter__(self) -> Any:
        begin_watching(self._run_function)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        end_watching()
        super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As `Recorder`."""
        return True

    @property
    def has_left(self) -> bool:
        return self.why_left is not None

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare what the call is given and what hangs on its block with what the tape has for it."""
        self._take_state()
        for value in self._values:
            if value.source is None or value.source.place in ("unknown", "generator"):
                continue
            given = find_external(value.source, block, args, kwargs)
            local = None if given is None else local_of(given)
            if local is None or not _has_geometry(value.ref, local):
                self._leave(f"{value.source} is not as {value.ref}")
                return
            self._own(value.index, local)
        for operator in filter(_is_kept_cast, self._operators):
            source = self._values[operator.args[0].value].source
            if source is not None and source.place == "parameter":
                parameter = find_external(source, block, args, kwargs)
                self._casts[id(parameter), self._values[operator.made()[0]].ref.dtype] = operator.made()[0]

    def saves(self, tensor: torch.Tensor) -> bool:
        """Compare the next tensor that autograd saves with the tape; return True if it is the tape's."""
        if self.has_left:
            return False
        slot = self._num_saved
        self._num_saved += 1
        self._take_state()
        local = local_of(tensor)
        if slot >= len(self._slots) or not self._is_ref(self._slots[slot], local):
            self._leave(f"autograd saves another tensor {slot}")
            return False
        self._at_hand.pop(self._slots[slot].value, None)
        return True

    def paused(self) -> _Pause:
        """Return a context in which operators are not the block's."""
        return _Pause(self)

    def finish(self) -> None:
        """Compare how much ran. Call it after the block."""
        if self.has_left:
            return
        missing = next((op for op in self._operators[self._next :] if not self._may_be_missing(op)), None)
        if missing is not None:
            self._leave(f"{missing.name} does not run")
        elif self._num_saved != len(self._slots):
            self._leave(f"autograd saves {self._num_saved} tensors for {len(self._slots)}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or self.why_left is not None:
            return func(*args, **kwargs)
        if types and any(map(runs_on_parts, types)):
            return NotImplemented  # what it runs on the parts comes here next
        if func is _CONSTANT:
            self._check_constant(args[0])
        if func.is_view:  # half of all
            if self._casts:
                self._note_cast(args[0])
            return func(*args, **kwargs)
        expected = self._take(func, args, kwargs)
        if expected is None:
            return self._run_unexpected(func, args, kwargs)
        again = None
        if self._compares and expected.may_run_again and not self._recomputable.isdisjoint(expected.made()):
            again = _copied(func, args, kwargs, expected)  # before what it writes to is written
        result = func(*args, **kwargs)
        made = _as_leaves(result)
        written = written_tensors(func, args, kwargs)
        if len(written) != len(expected.mutations):
            self._leave(f"{func} writes to other tensors")
            return result
        for position, value in expected.outputs:
            local = local_of(made[position])
            if not _is_as(self._values[value], local):
                self._leave(f"{func} makes another tensor than {self._values[value].ref}")
                return result
            self._own(value, local)
        for (_, value), tensor in zip(expected.mutations, written, strict=True):
            self._own(value, tensor)
        if func is _DROPOUT and 0 not in dict(expected.outputs):
            self._derive_dropout(args[0], made)
        if again is not None:
            self._compare(expected, made, written, func, *again)
            if self.unlike:
                self._leave(f"replay of {func} does not give the same bits")
        return result

    def _run_function(self, function: type[Function], args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run an `autograd.Function`, compared with the tape's next operator if that is one."""
        if self._is_paused or self.has_left or self.is_in_function:
            return run()
        expected = self._take_function(function)
        parts = None if expected is None else self._parts_of(expected, function, args)
        if expected is None or parts is None:  # its operators are compared, or everything is kept
            return run()
        is_compared = self._compares and expected.may_run_again and not self._recomputable.isdisjoint(expected.made())
        written = _written_by(expected, parts)
        with _Pause(self):
            copies = {key: copy_with_storage(t.detach()) for key, t in written.items()} if is_compared else {}
        self.is_in_function = True
        try:
            with _Pause(self):
                result = run()
        finally:
            self.is_in_function = False
            saved, self.saved_inside = self.saved_inside, []
        made = flattened(result, [tensor for tensor, _ in saved])
        self._own_made(expected, made, written, result)
        if is_compared and not self.has_left:
            self._compare_function(expected, parts, made, written, copies)
            if self.unlike:
                self._leave(f"replay of {expected.name} does not give the same bits")
        for tensor, pack in saved:
            pack(tensor)
        return result

    def _take_function(self, function: type[Function]) -> TapeOperator | None:
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            if operator.target == FunctionTarget(function):
                self._next = place + 1
                return operator
            if not self._may_be_missing(operator):
                break
        return None

    def _parts_of(self, operator: TapeOperator, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Return a Function's arguments taken apart; None, and leave the tape, if they are others than it has."""
        try:
            parts = taken_apart(args)
        except NotReplayableError as reason:
            self._leave(f"{operator.name} {reason}")
            return None
        if not self._same(operator.args, parts) or not call_of(function, parts).is_like(operator.kwargs["call"]):
            self._leave(f"{operator.name} is given others than {operator.args}")
            return None
        return parts

    def _own_made(
        self, operator: TapeOperator, made: tuple[Any, ...], written: dict[int, torch.Tensor], result: Any
    ) -> None:
        """Note what a Function has made, and leave the tape if that is not what it has."""
        for position, value in operator.outputs:
            tensor = made[position] if position < len(made) else None
            if not isinstance(tensor, torch.Tensor) or not _is_as(self._values[value], local_of(tensor)):
                self._leave(f"{operator.name} makes another tensor than {self._values[value].ref}")
                return
            self._own(value, local_of(tensor))
        for (_, value), tensor in zip(operator.mutations, written.values(), strict=True):
            self._own(value, tensor)
        try:
            is_same = self._same(operator.kwargs["call"].results, results_of(result))
        except NotReplayableError:
            is_same = False
        if not is_same:
            self._leave(f"{operator.name} returns others than {operator.kwargs['call'].results}")

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
        with _Pause(self), torch.no_grad(), drawing:
            others = operator.target(*map_tensors(parts, torch.Tensor, given), call=operator.kwargs["call"])
            pairs = [(value, made[position], others[position]) for position, value in operator.outputs]
            pairs += [
                (new, written[key], copies[key]) for (_, new), key in zip(operator.mutations, written, strict=True)
            ]
            self.unlike |= {
                value
                for value, one, other in pairs
                if value in self._recomputable and not same_bits(one.detach(), other)
            }

    def _own(self, value: int, tensor: torch.Tensor) -> None:
        """Note that the storage of `tensor` holds `value` now."""
        self._owners[storage_key(tensor.untyped_storage())] = value
        if value in self._wanted:
            self._at_hand[value] = tensor.detach()

    def _is_ref(self, ref: TensorRef, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is the tape's `ref`: in geometry, and of that value."""
        if not _has_geometry(ref, tensor):
            return False
        key = storage_key(tensor.untyped_storage())
        if self._casts and key not in self._owners:
            self._note_cast(tensor)
        owner = self._owners.get(key)
        if owner is None and self._may_come_unseen(ref.value):
            owner = self._owners[key] = ref.value
            if ref.value in self._wanted:
                self._at_hand[ref.value] = tensor.detach()
        return owner == ref.value

    def _note_cast(self, tensor: torch.Tensor) -> None:
        """Note which parameter's cast a tensor is, if autocast has kept it: no operator of the call may show it."""
        if has_storage(tensor) and storage_key(tensor.untyped_storage()) not in self._owners:
            value = self._casts.get((id(cast_from(tensor)), tensor.dtype))
            if value is not None:
                self._own(value, tensor)

    def _may_come_unseen(self, value: int) -> bool:
        """Return True for a value from elsewhere, which no operator of the call shows and nothing is replayed from."""
        source = self._values[value].source
        return source is not None and source.place == "unknown"

    def _take_state(self) -> None:
        """Take the generator's state where a plan does, so that the comparison draws from the same."""
        if self._num_saved in self._drawing:
            value, device = self._drawing[self._num_saved]
            self._states[value] = generator_state(device)

    def _derive_dropout(self, given: torch.Tensor, made: Any) -> None:
        """Take dropout's result for that of the product that the tape has for it (rule R5)."""
        product = self._operators[self._next] if self._next < len(self._operators) else None
        if product is None or product.target is not _DROPPED:
            self._leave("dropout draws where it did not")
            return
        self._next += 1
        ((_, value),) = product.outputs
        if not self._is_ref(product.args[0], local_of(given)):
            self._leave("dropout is given another tensor")
            return
        self._own(value, local_of(made[0]))
        if self._compares and value in self._recomputable:
            again = product.target(given, made[1], product.args[2])
            if not same_bits(made[0], again):
                self.unlike.add(value)

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

    def _take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapeOperator | None:
        """Return the tape's next operator, if it is this one, of the same numbers and tensors."""
        if func.namespace in COLLECTIVES:  # of which the tape has the tensors alone
            args, kwargs = tuple([leaf for leaf in leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]), {}
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            may_be_missing = self._may_be_missing(operator)
            if operator.target is func:
                if self._same(operator.args, args) and self._same(operator.kwargs, kwargs):
                    self._next = place + 1
                    return operator
                if not may_be_missing and not _is_cast_of_parameter(func, args) and _have_memory(args, kwargs):
                    self._leave(f"{func} is given others than {(operator.args, operator.kwargs)}")
            if not may_be_missing:
                return None
        return None

    def _same(self, expected: Any, given: Any) -> bool:
        """Return True if an operator is given what its tape has for it."""
        if expected is given:
            return True
        if isinstance(expected, TensorRef):
            return isinstance(given, torch.Tensor) and self._is_ref(expected, given)
        if isinstance(expected, Blank):
            return isinstance(given, torch.Tensor) and _has_geometry(expected, given)
        if isinstance(expected, (tuple, list)):
            if not isinstance(given, (tuple, list)) or len(expected) != len(given):
                return False
            return all(map(self._same, expected, given))
        if isinstance(expected, dict):
            return expected.keys() == given.keys() and all(self._same(v, given[name]) for name, v in expected.items())
        return type(expected) is type(given) and (expected == given or repr(expected) == repr(given))

    def _may_be_missing(self, operator: TapeOperator) -> bool:
        """Return True if no operator may run in its place: autocast keeps casts of parameters, which are noted as they
        are read."""
        if _is_kept_cast(operator):
            source = self._values[operator.args[0].value].source
            return source is not None and source.place == "parameter"
        return operator.target in _NOT_RUN

    def _check_constant(self, tensor: torch.Tensor) -> None:
        """Compare a number out of Python with the one that the tape makes next, if it makes any."""
        place = self._next
        while place < len(self._operators) and self._operators[place].target is not _FULL:
            if not self._may_be_missing(self._operators[place]):
                return
            place += 1
        if place == len(self._operators) or tensor.numel() != 1 or tensor.is_meta:
            return
        operator = self._operators[place]
        is_at_hand = tensor.device.type == "cpu"  # a step waits for no device (rule R10)
        if is_at_hand and not self._same(operator.args, (list(tensor.shape), tensor.item())):
            self._leave(f"a number is not as in {operator.args}")
            return
        self._next = place + 1
        self._own(operator.made()[0], tensor)

    def _run_unexpected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what the tape does not have next, which may make or change no storage of the block's."""
        if schema_of(func).is_mutable and _have_memory(args, kwargs):
            self._leave(f"{func} runs, which it has not")
        result = func(*args, **kwargs)
        if self.has_left:
            return result
        known = {storage_key(tensor.untyped_storage()) for tensor in _stored(args, kwargs)}
        new = {storage_key(tensor.untyped_storage()) for tensor in _stored(result)} - known
        for storage in new:  # another one that died may have been there
            self._owners.pop(storage, None)
        if new and not _is_cast_of_parameter(func, args):
            self._leave(f"{func} runs, which it has not")
        return result

    def _leave(self, why: str) -> None:
        if self.has_left:
            return
        self.why_left = why
        at_hand, self._at_hand = self._at_hand, {}
        with _Pause(self):
            self._on_leaving(at_hand)


class _Pause:
    """While open, operators run without being compared."""

    def __init__(self, validator: Validator) -> None:
        self._validator = validator

    def __enter__(self) -> None:
        self._before, self._validator._is_paused = self._validator._is_paused, True

    def __exit__(self, *exception: object) -> None:
        self._validator._is_paused = self._before


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
    """Return the arguments of an operator with a copy of each tensor that it writes to, and what replay has for those
    of which it reads no element."""
    given = zip(args, operator.args, strict=True)
    args = tuple([stand_in(blank, blank.device) if isinstance(blank, Blank) else each for each, blank in given])
    copies = {id(tensor): copy_with_storage(tensor) for tensor in written_tensors(func, args, kwargs)}
    return map_tensors((args, kwargs), torch.Tensor, lambda tensor: copies.get(id(tensor), tensor))


def _is_kept_cast(operator: TapeOperator) -> bool:
    """Return True for an operator that casts a tensor whole and to another type, as autocast does."""
    return operator.target is TO_COPY and operator.kwargs.keys() == {"dtype"}


def _is_cast_of_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    return func is TO_COPY and isinstance(args[0], nn.Parameter)


def _have_memory(*trees: Any) -> bool:
    """Return True unless a tensor has no memory, as those have on which DTensors find out shapes."""
    return not any(isinstance(leaf, torch.Tensor) and (leaf.is_meta or is_fake(leaf)) for leaf in leaves(*trees))


def _stored(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors that have memory, of what ranks divide their parts."""
    tensors = [local_of(leaf) for leaf in leaves(*trees) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta and not is_fake(tensor) and has_storage(tensor)]


def _is_as(expected: TapeValue, made: torch.Tensor) -> bool:
    return _has_geometry(expected.ref, made) and made.untyped_storage().nbytes() == expected.nbytes


def _has_geometry(ref: TensorRef | Blank, tensor: torch.Tensor) -> bool:
    size, stride, offset = ref.geometry
    return (
        tensor.dtype is ref.dtype
        and tensor.shape == size
        and has_storage(tensor)
        and tensor.stride() == stride
        and tensor.storage_offset() == offset
    )
