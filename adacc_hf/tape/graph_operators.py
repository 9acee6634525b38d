"""Operators of a traced path at any size, from the path's graph on fake tensors. No operator of the block runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from adacc_hf.tape.operator_effects import DeclaredRngUse
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.tape import Tape, TensorRef, map_tensors
from adacc_hf.tape.tape_template import TapeTemplate
from adacc_hf.torch_glue.dynamo_gaps import more_operators

Operators = tuple[list[tuple[Any, ...]], list[str]]
"""(name, arguments, results) of each operator of a call, with all sizes, and the layouts of the saved tensors."""


class _Inputs(nn.Module):
    """Module with those inputs of a graph that are parameters."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        for number, tensor in enumerate(inputs):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"input_{number}", tensor)


def graph_operators(graph: Callable[..., Any], inputs: Sequence[Any]) -> Operators:
    """Run `graph` on fakes of `inputs`, and return its operators as a recorder would record them."""
    mode = FakeTensorMode()
    fakes = [_fake(mode, each) if isinstance(each, torch.Tensor) else each for each in inputs]
    with mode:
        return operators_of(_tape_of(graph, fakes))


class SymbolicGraph:
    """Operators of a traced graph at all sizes, from one run on `examples`, the fakes of a trace, whose sizes are
    symbols. `inputs` are those of a call."""

    def __init__(self, graph: Callable[..., Any], examples: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._examples = examples
        mode: Any = next(each for each in examples if isinstance(each, FakeTensor)).fake_mode
        num_guards = len(mode.shape_env.guards)
        with mode:
            self._tape = _tape_of(graph, [_symbolic_fake(*pair) for pair in zip(examples, inputs, strict=True)])
        self._conditions = [guard.expr for guard in mode.shape_env.guards[num_guards:]]
        """Conditions on the sizes that operators asked for."""
        self._template = TapeTemplate(self._tape)
        self._expressions = list(map(_expression_of, self._template.numbers))

    def operators(self, inputs: Sequence[Any]) -> Operators | None:
        """Return the operators of a call with these inputs, in some milliseconds. None if the run did not tell them."""
        import sympy  # type: ignore[import-untyped]

        pairs = [
            (_expression_of(symbolic), number)
            for example, value in zip(self._examples, inputs, strict=True)
            for symbolic, number in zip(_sizes_of(example), _sizes_of(value), strict=True)
        ]
        sizes = {each: sympy.Integer(number) for each, number in pairs if getattr(each, "is_Symbol", False)}
        if any(_evaluated(expression, sizes) != number for expression, number in pairs):
            return None
        if any(condition.xreplace(sizes) != True for condition in self._conditions):  # noqa: E712  # sympy's true
            return None
        numbers = [_evaluated(expression, sizes) for expression in self._expressions]
        return operators_of(self._template.fill(self._tape, numbers, ""))


def _symbolic_fake(example: Any, value: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return example
    fake = example.detach().requires_grad_(value.requires_grad)
    return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake


def _sizes_of(value: Any) -> tuple[Any, ...]:
    """Return the sizes, strides and offset of a tensor, or the number itself."""
    if isinstance(value, torch.Tensor):
        return *value.shape, *value.stride(), value.storage_offset()
    return (value,) if isinstance(value, int | torch.SymInt) else ()


def _expression_of(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _evaluated(expression: Any, sizes: Mapping[Any, Any]) -> Any:
    """Return the number of a sympy expression, or None if the sizes do not tell it, as of the storage behind a view."""
    value = expression if isinstance(expression, int) else expression.xreplace(sizes)
    return int(value) if isinstance(value, int) or value.is_Integer else None


def _tape_of(graph: Callable[..., Any], fakes: Sequence[Any]) -> Tape:
    recorder = Recorder(_Inputs(fakes), tuple(fakes), {}, DeclaredRngUse)
    recorder.base_of = lambda tensor: tensor  # detaching takes a third of the time, and fakes have no memory
    save = partial(Recorder.save, weakref.proxy(recorder))
    # No backward follows, so `save` returns no tensor. A returned tensor would make autograd's graph a reference cycle.
    # Dynamo's graphs of an `autograd.Function` are cycles anyway, so `save` refers to the recorder weakly.
    with more_operators(), saved_tensors_hooks(save, torch.Tensor.detach), recorder:
        graph(*fakes)
    return recorder.tape()


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake of an input, without its gradient and its graph."""
    fake = mode.from_tensor(tensor.detach(), static_shapes=True).requires_grad_(tensor.requires_grad)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def operators_of(tape: Tape) -> Operators:
    """Return the operators of `tape`. Strides of dimensions of size 1, which no operator uses, are left out."""
    operators = []
    for op in tape.operators:
        arguments = map_tensors((op.args, op.kwargs), TensorRef, _without_unused_strides)
        operators.append((op.name, repr(arguments), op.outputs, op.mutations, op.random, op.generator))
    return operators, [repr(slot) for slot in tape.slots]


def _without_unused_strides(ref: TensorRef) -> TensorRef:
    size, stride, offset = ref.geometry
    used = tuple(0 if length == 1 else step for length, step in zip(size, stride, strict=True))
    return replace(ref, geometry=(size, used, offset))
