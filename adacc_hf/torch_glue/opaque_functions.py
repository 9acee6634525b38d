"""Traces in which an `autograd.Function` is one node, because Dynamo cannot trace its forward.

Dynamo stops at code that writes memory by address, such as kernels of C++ extensions. During a trace, the forward of
such a Function is replaced by a function that answers with fake tensors. Their shapes follow from a real call: each
size of a result is a size of the Function's arguments, or a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import Function

from adacc_hf.torch_glue.dynamo_gaps import guard_identity
from adacc_hf.torch_glue.function_calls import has_setup
from adacc_hf.torch_glue.private import storage_key, tree_leaves, tree_map
from adacc_hf.torch_glue.tensors import storage_of
from adacc_hf.torch_glue.watchers import patched


class Result(NamedTuple):
    """Description of one tensor that a Function returned."""

    argument: int | None  # index of the tensor argument that was returned, perhaps changed in place
    sizes: tuple[int | tuple[int, int], ...]  # each is (index of a tensor argument, dimension), or a number
    dtype: torch.dtype


def describe_results(args: tuple[Any, ...], result: Any) -> Any:
    """Return the `result` of a Function's call with each tensor replaced by its `Result`."""
    tensors = _tensors_in(args)
    storages = [storage_key(storage_of(tensor)) for tensor in tensors]
    # Reversed, so that the first argument with a size wins. Whole shapes precede single sizes.
    places = {n: (i, d) for i, tensor in reversed([*enumerate(tensors)]) for d, n in enumerate(tensor.shape) if n > 1}
    shapes = {tensor.shape: i for i, tensor in reversed([*enumerate(tensors)])}

    def describe(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        key, same = storage_key(storage_of(tensor)), shapes.get(tensor.shape)
        if same is not None:
            sizes: Any = tuple((same, d) for d in range(tensor.dim()))
        else:
            sizes = tuple(places.get(n, n) for n in tensor.shape)
        return Result(storages.index(key) if key in storages else None, sizes, tensor.dtype)

    return tree_map(describe, result)


@contextmanager
def opaque_functions(results: Mapping[type[Function], Any], allowed: Any, met: set[type[Function]]) -> Iterator[None]:
    """Let Dynamo take each Function in `results` (from `describe_results`) as one node inside the `with` block.

    `allowed` is Dynamo's set of the ids of callables that it does not trace into. Functions that a trace meets are
    added to `met`. An object that is an argument becomes None, and its identity is guarded. No graph can hold it.
    """
    from torch._dynamo.variables import AutogradFunctionVariable, ConstantVariable, UserDefinedObjectVariable

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "apply" and self.fn_cls in results:
            args = [arg.realize() for arg in args]
            for place, arg in enumerate(args):
                if isinstance(arg, UserDefinedObjectVariable):
                    guard_identity(arg)  # none is needed if traced code creates the object
                    args[place] = ConstantVariable(None)
        return original(self, tx, name, args, kwargs)

    original = AutogradFunctionVariable.call_method
    before = {function: vars(function).get("forward") for function in results}
    added = [id(function) for function in results if id(function) not in allowed]
    try:
        for number in added:
            allowed.add(number)
        for function, described in results.items():
            function.forward = staticmethod(_answer(function, described, met))  # type: ignore[method-assign]
        with patched([(AutogradFunctionVariable, "call_method", call_method)]):
            yield
    finally:
        for number in added:
            allowed.remove(number)
        for function, forward in before.items():
            if forward is None:
                del function.forward
            else:
                function.forward = forward  # type: ignore[method-assign]


def _answer(function: type[Function], described: Any, met: set[type[Function]]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        met.add(function)
        tensors = _tensors_in(args if has_setup(function) else args[1:])

        def create(result: Any) -> Any:
            if not isinstance(result, Result):
                return result
            if result.argument is not None:
                return tensors[result.argument]
            sizes = [n if isinstance(n, int) else tensors[n[0]].shape[n[1]] for n in result.sizes]
            return tensors[0].new_empty(sizes, dtype=result.dtype)

        return tree_map(create, described, is_leaf=lambda item: isinstance(item, Result))

    return forward


def _tensors_in(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
