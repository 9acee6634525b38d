"""Validated calls: calls of a block that run under the block's plan while each operator is compared with the tape.

If the call diverges from its tape, every tensor that the call saves afterwards is kept. Earlier saved tensors follow
the plan, because the operators that made these tensors matched the tape. So the call is exact in any case.
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
from adacc_hf.torch_glue.tensors import kept_by_autograd


class KeptTensor:
    """Object that autograd stores for a tensor that is saved after the call diverged from its tape."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = kept_by_autograd(tensor)
        self.version = version_of(tensor)


class ValidatedCall:
    """Validated call of a block under a plan: each operator is compared with the plan's tape while the call runs."""

    def __init__(
        self,
        name: str,
        plan: ExecutionPlan,
        codecs: Mapping[int, Coder],
        externals: list[tuple[int, torch.Tensor]],
        checks_bits: bool = False,
    ) -> None:
        """Initialize for the block `name`. If `checks_bits` is True, also check that replay gives the same bits (rule
        R7).

        `externals` contains (value index, tensor) for each tensor that replay reads and that existed before the call.
        """
        self.name = name
        self.divergence: str | None = None
        """Description of the first difference from the plan's tape, or None."""
        self.mismatched_values: frozenset[int] = frozenset()
        """Indices of values that replay did not recompute bit for bit."""
        self._begin = partial(Call, plan, name, codecs, externals)
        self._call: Call | None = None
        """State of the call under the plan (`Call`). None if the arguments of the call differ from the tape."""
        self._validator = Validator(plan, checks_bits, self._on_divergence)

    @property
    def unpacked_slots(self) -> list[int] | None:
        """List to which backward appends the indices of the saved tensors that it unpacks. None if the call diverged
        from its tape."""
        return None if self._call is None or self.divergence is not None else self._call.unpacked_slots

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, compare the call with the tape, and return `fn(*args)`.

        Set `divergence` if call and tape differ.
        """
        validator = self._validator
        validator.begin(block, args, kwargs)
        if not validator.has_diverged:
            self._call = self._begin()
            self._call.unpacked_slots = []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), validator:
            result = fn(*args)
        validator.finish()
        if self._call is not None and not validator.has_diverged:
            self._call.finish()
        self.divergence, self.mismatched_values = validator.divergence, frozenset(validator.mismatched_values)
        del self._validator, self._begin  # autograd keeps this object alive through `_unpack`
        return result

    def _pack(self, tensor: torch.Tensor) -> Any:
        validator = self._validator
        if not validator.saves(tensor) or self._call is None:
            return KeptTensor(tensor)
        with validator.paused():
            return self._call.pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, KeptTensor):
            assert self._call is not None  # it packed the tensor
            return self._call.unpack(packed)
        if version_of(packed.tensor) != packed.version:
            raise changed_in_place(self.name, "a saved tensor")
        return packed.tensor

    def _on_divergence(self, values: Mapping[int, torch.Tensor]) -> None:
        if self._call is not None:
            with self._validator.paused():
                self._call.note_divergence(values)
