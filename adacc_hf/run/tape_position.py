"""Position of a call that is compared with its tape: the next operator, and the tape's value in each storage.

As in a recording, each storage of the call contains one value of the tape. A tensor of the call matches a tensor
reference of the tape if both have the same geometry and the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.tape.function_operators import FunctionTarget
from adacc_hf.tape.inputs import find_external
from adacc_hf.tape.tape import Blank, Tape, TapeOperator, TensorRef, has_storage, leaves
from adacc_hf.torch_glue.compat import cast_source
from adacc_hf.torch_glue.private import TO_COPY, storage_key
from adacc_hf.torch_glue.tensors import is_fake, local_of

_DROPPED = torch.ops.aten.native_dropout_backward.default
_FULL = torch.ops.aten.full.default
_NOT_RUN = (_FULL, _DROPPED)
"""Operators that the recorder puts on a tape in place of others, so that no call runs them: `aten.full`, which makes a
constant from a Python number, and the product that gives dropout's result."""


class TapePosition:
    """Position of a running call in its tape. Compares arguments, operators and saved tensors in the tape's order.

    At the first difference, `on_divergence` is called with a dict from value index to tensor. The dict contains the
    values in `stored` (values that the plan stores) that autograd has not saved yet. Later operators are not compared.
    """

    def __init__(
        self, tape: Tape, stored: frozenset[int], on_divergence: Callable[[Mapping[int, torch.Tensor]], None]
    ) -> None:
        self.divergence: str | None = None
        """Description of the first difference from the tape, or None."""
        self.num_saved = 0
        """Number of tensors that autograd has saved so far in the call."""
        self.values = tape.values
        self._operators, self._slots = tape.operators, tape.slots
        self._stored = stored
        self._on_divergence = on_divergence
        self._next = 0
        self._stored_bases: dict[int, torch.Tensor] = {}
        self._owners: dict[int, int] = {}
        """Index of the tape's value that each storage currently contains, by storage key."""
        self._casts: dict[tuple[int, torch.dtype], int] = {}
        """Index of the tape's value for each cast of a parameter that autocast may cache, by (id of the parameter,
        dtype)."""

    @property
    def has_diverged(self) -> bool:
        return self.divergence is not None

    def diverge(self, reason: str) -> None:
        """Mark the call as diverged from its tape, and record the reason. Do nothing if the call has diverged
        already."""
        if not self.has_diverged:
            self.divergence = reason
            stored_bases, self._stored_bases = self._stored_bases, {}
            self._on_divergence(stored_bases)

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the call's arguments, and the block's parameters, buffers and attached tensors, with the tape."""
        for value in self.values:
            if value.source is None or value.source.place in ("unknown", "generator"):
                continue
            tensor = find_external(value.source, block, args, kwargs)
            local = None if tensor is None else local_of(tensor)
            if local is None or not has_geometry(value.ref, local):
                self.diverge(f"{value.source} differs from {value.ref}")
                return
            self.own(value.index, local)
        for operator in filter(_is_cacheable_cast, self._operators):
            source = self.values[operator.args[0].value].source
            if source is not None and source.place == "parameter":
                parameter = find_external(source, block, args, kwargs)
                self._casts[id(parameter), self.values[operator.results()[0]].ref.dtype] = operator.results()[0]

    def saves(self, tensor: torch.Tensor) -> bool:
        """Compare the next tensor that autograd saves with the next saved tensor on the tape.

        Return True if they match.
        """
        slot = self.num_saved
        self.num_saved += 1
        if slot >= len(self._slots) or not self.is_ref(self._slots[slot], local_of(tensor)):
            self.diverge(f"autograd saves a different tensor {slot}")
            return False
        self._stored_bases.pop(self._slots[slot].value, None)
        return True

    def finish(self) -> None:
        """Mark the call as diverged, unless all operators of the tape have run and all tensors on the tape were saved.

        Call this method after the block has returned.
        """
        missing = next((op for op in self._operators[self._next :] if not self._may_be_missing(op)), None)
        if missing is not None:
            self.diverge(f"{missing.name} does not run")
        elif self.num_saved != len(self._slots):
            self.diverge(f"autograd saves {self.num_saved} tensors, but the tape has {len(self._slots)}")

    # Operators.

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapeOperator | None:
        """Compare the operator that the call runs next with the tape's next operator, and advance if they match.

        The numbers and tensors among the arguments must match too. Return the tape's operator, or None without a match.
        """
        for place, operator in self._candidates():
            if operator.target is func:
                if operator.is_collective:  # the tape has only its tensor arguments
                    args, kwargs = tuple([leaf for leaf in leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]), {}
                if self.same(operator.args, args) and self.same(operator.kwargs, kwargs):
                    self._next = place + 1
                    return operator
                is_optional = self._may_be_missing(operator) or is_cast_of_parameter(func, args)
                if not is_optional and have_memory(args, kwargs):
                    self.diverge(f"{func} has arguments that differ from {(operator.args, operator.kwargs)}")
        return None

    def take_function(self, function: type[Function]) -> TapeOperator | None:
        """If the tape's next operator is the `autograd.Function` that the call runs next, advance and return this
        operator.

        Else return None.
        """
        target = FunctionTarget(function)
        for place, operator in self._candidates():
            if operator.target == target:
                self._next = place + 1
                return operator
        return None

    def take_number(self, tensor: torch.Tensor) -> None:
        """Compare a tensor made from a Python number with the tape's next constant, if there is one, and advance."""
        candidates = ((place, operator) for place, operator in self._candidates() if operator.target is _FULL)
        place, operator = next(candidates, (0, None))
        if operator is None or tensor.numel() != 1 or tensor.is_meta:
            return
        is_on_cpu = tensor.device.type == "cpu"  # a step must not wait for the device (rule R10)
        if is_on_cpu and not self.same(operator.args, (list(tensor.shape), tensor.item())):
            self.diverge(f"a constant differs from {operator.args}")
            return
        self._next = place + 1
        self.own(operator.results()[0], tensor)

    def take_dropout(self, input_tensor: torch.Tensor, result: torch.Tensor) -> TapeOperator | None:
        """Compare a dropout's result with the tape's product input * mask * scale, and advance.

        On the tape, a dropout is a draw of the mask and this product, because only the mask is random (rule R5).

        Return the tape's operator for the product. If another operator is next on the tape, mark the call as diverged
        and return None.
        """
        product = self._operators[self._next] if self._next < len(self._operators) else None
        if product is None or product.target is not _DROPPED:
            self.diverge("dropout runs, but is not next on the tape")
            return None
        self._next += 1
        if not self.is_ref(product.args[0], local_of(input_tensor)):
            self.diverge("dropout has a different input")
            return None
        self.own(product.results()[0], local_of(result))
        return product

    def _candidates(self) -> Iterator[tuple[int, TapeOperator]]:
        for place in range(self._next, len(self._operators)):
            operator = self._operators[place]
            yield place, operator
            if not self._may_be_missing(operator):
                return

    def _may_be_missing(self, operator: TapeOperator) -> bool:
        """Return True if a call may follow the tape without running `operator`.

        Casts of parameters may be missing, because autocast caches them. Operators in `_NOT_RUN` are always missing,
        because only the recorder puts them on the tape.
        """
        if _is_cacheable_cast(operator):
            source = self.values[operator.args[0].value].source
            return source is not None and source.place == "parameter"
        return operator.target in _NOT_RUN

    # Tensors.

    def own(self, value: int, tensor: torch.Tensor) -> None:
        """Record that the storage of `tensor` now contains the tape's `value`."""
        self._owners[storage_key(tensor.untyped_storage())] = value
        if value in self._stored:
            self._stored_bases[value] = tensor.detach()

    def disown(self, storage: int) -> None:
        """Forget which value of the tape the storage with the key `storage` contains.

        Called when a new storage has the same key as a storage that was freed.
        """
        self._owners.pop(storage, None)

    def note_cast(self, tensor: torch.Tensor) -> None:
        """If `tensor` is a cast of a parameter that an earlier call computed and autocast cached, record which value of
        the tape it is."""
        if self._casts and has_storage(tensor) and storage_key(tensor.untyped_storage()) not in self._owners:
            value = self._casts.get((id(cast_source(tensor)), tensor.dtype))
            if value is not None:
                self.own(value, tensor)

    def is_ref(self, ref: TensorRef, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` of the call corresponds to `ref` of the tape: same geometry, and same value."""
        if not has_geometry(ref, tensor):
            return False
        key = storage_key(tensor.untyped_storage())
        if key not in self._owners:
            self.note_cast(tensor)
        owner = self._owners.get(key)
        if owner is None and self._has_unknown_source(ref.value):
            self.own(ref.value, tensor)
            return True
        return owner == ref.value

    def _has_unknown_source(self, value: int) -> bool:
        """Return True if the tape does not say where a call finds `value` (argument, parameter, buffer or attached
        tensor).

        Replay never reads values with an unknown source.
        """
        source = self.values[value].source
        return source is not None and source.place == "unknown"

    def same(self, expected: Any, argument: Any) -> bool:
        """Return True if `argument`, passed to an operator in the call, matches `expected`, the argument on the
        tape."""
        if expected is argument:
            return True
        if isinstance(expected, TensorRef):
            return isinstance(argument, torch.Tensor) and self.is_ref(expected, argument)
        if isinstance(expected, Blank):
            return isinstance(argument, torch.Tensor) and has_geometry(expected, argument)
        if isinstance(expected, (tuple, list)):
            if not isinstance(argument, (tuple, list)) or len(expected) != len(argument):
                return False
            return all(map(self.same, expected, argument))
        if isinstance(expected, dict):
            return expected.keys() == argument.keys() and all(
                self.same(v, argument[name]) for name, v in expected.items()
            )
        return type(expected) is type(argument) and (expected == argument or repr(expected) == repr(argument))


def _is_cacheable_cast(operator: TapeOperator) -> bool:
    """Return True for an operator that casts a whole tensor to another dtype, as autocast does."""
    return operator.target is TO_COPY and operator.kwargs.keys() == {"dtype"}


def is_cast_of_parameter(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the call's operator casts a parameter, as autocast does."""
    return func is TO_COPY and isinstance(args[0], nn.Parameter)


def have_memory(*trees: Any) -> bool:
    """Return False if a tensor in `trees` is a meta or fake tensor, on which a DTensor infers shapes."""
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
