"""Position of a running call in its tape: the next operator, and the value that each storage holds.

Values are known by their storages, as in a recording. A tensor is the tape's if it has the tape's geometry, and its
storage holds the tape's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.tape.function_operators import FunctionTarget
from adacc_hf.tape.inputs import find_external
from adacc_hf.tape.tape import COLLECTIVES, Blank, Tape, TapeOperator, TensorRef, has_storage, leaves
from adacc_hf.torch_glue.compat import cast_from
from adacc_hf.torch_glue.private import TO_COPY, storage_key
from adacc_hf.torch_glue.tensors import is_fake, local_of

_DROPPED = torch.ops.aten.native_dropout_backward.default
_FULL = torch.ops.aten.full.default
_NOT_RUN = (_FULL, _DROPPED)
"""Operators that a tape may have where a call runs none of that name: a number out of Python, dropout's result."""


class TapePosition:
    """Comparison of a call with a tape: its arguments, operators and saved tensors, in the tape's order.

    At the first difference `on_leaving` is called with those tensors of the values `stored` that autograd has not saved
    yet, by value. Nothing is compared from then on.
    """

    def __init__(
        self, tape: Tape, stored: frozenset[int], on_leaving: Callable[[Mapping[int, torch.Tensor]], None]
    ) -> None:
        self.why_left: str | None = None
        """The difference at which the call left the tape; None if it did not."""
        self.num_saved = 0
        self.values = tape.values
        self._operators, self._slots = tape.operators, tape.slots
        self._stored = stored
        self._on_leaving = on_leaving
        self._next = 0
        self._at_hand: dict[int, torch.Tensor] = {}
        self._owners: dict[int, int] = {}
        """The value that each storage holds now, by storage."""
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        """Values of casts that autocast keeps, by the parameter's id and the type."""

    @property
    def has_left(self) -> bool:
        return self.why_left is not None

    def leave(self, why: str) -> None:
        """Compare nothing from now on. Later reasons are ignored."""
        if not self.has_left:
            self.why_left = why
            at_hand, self._at_hand = self._at_hand, {}
            self._on_leaving(at_hand)

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the arguments of a call, and the tensors that hang on its block, with the tape's externals."""
        for value in self.values:
            if value.source is None or value.source.place in ("unknown", "generator"):
                continue
            given = find_external(value.source, block, args, kwargs)
            local = None if given is None else local_of(given)
            if local is None or not has_geometry(value.ref, local):
                self.leave(f"{value.source} is not as {value.ref}")
                return
            self.own(value.index, local)
        for operator in filter(_is_kept_cast, self._operators):
            source = self.values[operator.args[0].value].source
            if source is not None and source.place == "parameter":
                parameter = find_external(source, block, args, kwargs)
                self._casts[id(parameter), self.values[operator.made()[0]].ref.dtype] = operator.made()[0]

    def saves(self, tensor: torch.Tensor) -> bool:
        """Compare the next tensor that autograd saves with the tape; return True if it is the tape's."""
        slot = self.num_saved
        self.num_saved += 1
        if slot >= len(self._slots) or not self.is_ref(self._slots[slot], local_of(tensor)):
            self.leave(f"autograd saves another tensor {slot}")
            return False
        self._at_hand.pop(self._slots[slot].value, None)
        return True

    def finish(self) -> None:
        """Compare how much ran. Call it after the block."""
        missing = next((op for op in self._operators[self._next :] if not self._may_be_missing(op)), None)
        if missing is not None:
            self.leave(f"{missing.name} does not run")
        elif self.num_saved != len(self._slots):
            self.leave(f"autograd saves {self.num_saved} tensors for {len(self._slots)}")

    # Operators.

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapeOperator | None:
        """Return the tape's next operator and move past it, if the call runs it with the same numbers and tensors."""
        if func.namespace in COLLECTIVES:  # of which the tape has the tensors alone
            args, kwargs = tuple([leaf for leaf in leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]), {}
        for place, operator in self._candidates():
            if operator.target is func:
                if self.same(operator.args, args) and self.same(operator.kwargs, kwargs):
                    self._next = place + 1
                    return operator
                is_optional = self._may_be_missing(operator) or is_cast_of_parameter(func, args)
                if not is_optional and have_memory(args, kwargs):
                    self.leave(f"{func} is given others than {(operator.args, operator.kwargs)}")
        return None

    def take_function(self, function: type[Function]) -> TapeOperator | None:
        """Return the tape's next operator and move past it, if it is this `autograd.Function`."""
        target = FunctionTarget(function)
        for place, operator in self._candidates():
            if operator.target == target:
                self._next = place + 1
                return operator
        return None

    def take_number(self, tensor: torch.Tensor) -> None:
        """Compare a number out of Python with the one that the tape makes next, if it makes any."""
        candidates = ((place, operator) for place, operator in self._candidates() if operator.target is _FULL)
        place, operator = next(candidates, (0, None))
        if operator is None or tensor.numel() != 1 or tensor.is_meta:
            return
        is_at_hand = tensor.device.type == "cpu"  # a step waits for no device (rule R10)
        if is_at_hand and not self.same(operator.args, (list(tensor.shape), tensor.item())):
            self.leave(f"a number is not as in {operator.args}")
            return
        self._next = place + 1
        self.own(operator.made()[0], tensor)

    def take_dropout(self, given: torch.Tensor, result: torch.Tensor) -> TapeOperator | None:
        """Take dropout's result for the product that the tape has in its place, and return that operator (rule R5)."""
        product = self._operators[self._next] if self._next < len(self._operators) else None
        if product is None or product.target is not _DROPPED:
            self.leave("dropout draws where it did not")
            return None
        self._next += 1
        if not self.is_ref(product.args[0], local_of(given)):
            self.leave("dropout is given another tensor")
            return None
        self.own(product.made()[0], local_of(result))
        return product

    def _candidates(self) -> Iterator[tuple[int, TapeOperator]]:
        """Yield (place, operator) of the operators that the call may run next."""
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            yield place, operator
            if not self._may_be_missing(operator):
                return

    def _may_be_missing(self, operator: TapeOperator) -> bool:
        """Return True if a call need not run an operator of this name.

        Autocast keeps casts of parameters. They are noted where they are read.
        """
        if _is_kept_cast(operator):
            source = self.values[operator.args[0].value].source
            return source is not None and source.place == "parameter"
        return operator.target in _NOT_RUN

    # Tensors.

    def own(self, value: int, tensor: torch.Tensor) -> None:
        """Note that the storage of `tensor` holds `value` now."""
        self._owners[storage_key(tensor.untyped_storage())] = value
        if value in self._stored:
            self._at_hand[value] = tensor.detach()

    def disown(self, storage: int) -> None:
        """Note that a storage is a new one. Another one may have died in its place."""
        self._owners.pop(storage, None)

    def note_cast(self, tensor: torch.Tensor) -> None:
        """Note the parameter of a cast that autocast may have kept from an earlier call: no operator shows it."""
        if self._casts and has_storage(tensor) and storage_key(tensor.untyped_storage()) not in self._owners:
            value = self._casts.get((id(cast_from(tensor)), tensor.dtype))
            if value is not None:
                self.own(value, tensor)

    def is_ref(self, ref: TensorRef, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is the tape's `ref`: in geometry, and of that value."""
        if not has_geometry(ref, tensor):
            return False
        key = storage_key(tensor.untyped_storage())
        if key not in self._owners:
            self.note_cast(tensor)
        owner = self._owners.get(key)
        if owner is None and self._comes_from_elsewhere(ref.value):
            self.own(ref.value, tensor)
            return True
        return owner == ref.value

    def _comes_from_elsewhere(self, value: int) -> bool:
        """Return True for a value of unknown origin, which no operator shows and nothing is replayed from."""
        source = self.values[value].source
        return source is not None and source.place == "unknown"

    def same(self, expected: Any, given: Any) -> bool:
        """Return True if an operator is given what its tape has for it."""
        if expected is given:
            return True
        if isinstance(expected, TensorRef):
            return isinstance(given, torch.Tensor) and self.is_ref(expected, given)
        if isinstance(expected, Blank):
            return isinstance(given, torch.Tensor) and has_geometry(expected, given)
        if isinstance(expected, (tuple, list)):
            if not isinstance(given, (tuple, list)) or len(expected) != len(given):
                return False
            return all(map(self.same, expected, given))
        if isinstance(expected, dict):
            return expected.keys() == given.keys() and all(self.same(v, given[name]) for name, v in expected.items())
        return type(expected) is type(given) and (expected == given or repr(expected) == repr(given))


def _is_kept_cast(operator: TapeOperator) -> bool:
    """Return True for an operator that casts a whole tensor to another type, as autocast does."""
    return operator.target is TO_COPY and operator.kwargs.keys() == {"dtype"}


def is_cast_of_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    return func is TO_COPY and isinstance(args[0], nn.Parameter)


def have_memory(*trees: Any) -> bool:
    """Return False if a tensor has no memory: DTensors find out shapes on such tensors."""
    return not any(isinstance(leaf, torch.Tensor) and (leaf.is_meta or is_fake(leaf)) for leaf in leaves(*trees))


def has_geometry(ref: TensorRef | Blank, tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has the dtype, size, stride and offset of `ref`."""
    size, stride, offset = ref.geometry
    return (
        tensor.dtype is ref.dtype
        and tensor.shape == size
        and has_storage(tensor)
        and tensor.stride() == stride
        and tensor.storage_offset() == offset
    )
