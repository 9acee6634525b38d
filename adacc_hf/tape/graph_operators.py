"""Operators of a traced path at any size, from the path's graph on fake tensors. No operator of the block runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from adacc_hf.tape.operator_effects import DeclaredRngUse
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.tape import Tape, TensorRef, map_tensors
from adacc_hf.torch_glue.dynamo_gaps import more_operators
from adacc_hf.torch_glue.private import FakeTensorMode

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
    mode.cache_enabled = False  # results of a size that has not occurred are never cached
    fakes = [_fake(mode, each) if isinstance(each, torch.Tensor) else each for each in inputs]
    recorder = Recorder(_Inputs(fakes), tuple(fakes), {}, DeclaredRngUse)
    recorder.base_of = lambda tensor: tensor  # detaching takes a third of the time, and fakes have no memory
    save = partial(Recorder.save, weakref.proxy(recorder))
    # `save` returns no tensor, and refers to the recorder weakly, because autograd's graph would become a cycle.
    with mode, more_operators(), saved_tensors_hooks(save, torch.Tensor.detach), recorder:
        graph(*fakes)
    return operators_of(recorder.tape())


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
