"""A validated call of a block: it runs under its plan, and each of its operators is compared with the tape.

If the call leaves its tape, every tensor that it saves from there on is kept. Tensors that it saved before follow the
plan, since the operators that made them were the tape's: the call is exact all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from adacc_hf.kernels.codecs import Coder
from adacc_hf.run.call import Call, changed_in_place
from adacc_hf.run.validation import Validator
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.torch_glue.private import version_of


class Kept:
    """Packed object for a saved tensor that the tape does not have: the tensor itself, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = version_of(tensor)


class Deferred:
    """Packed object for a tensor that a Function saved. It is packed after the Function has been compared."""

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed: Any = None


class ValidatedCall:
    """One call of a block under its plan, compared with the plan's tape on the way."""

    def __init__(
        self,
        name: str,
        plan: ExecutionPlan,
        codecs: Mapping[int, Coder],
        externals: list[tuple[int, torch.Tensor]],
        compares: bool = False,
    ) -> None:
        """If `compares`, the bits of replay are compared too."""
        self.name = name
        self.why_left: str | None = None
        """The difference at which the call left the plan's tape; None if it did not."""
        self.unlike: frozenset[int] = frozenset()
        """Values that replay did not recompute bit for bit."""
        self._begin = partial(Call, plan, name, codecs, externals)
        self._call: Call | None = None
        """None if the call differs from the tape by its arguments already."""
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
            with self._validator.paused():
                self._call.leave_tape(values)
