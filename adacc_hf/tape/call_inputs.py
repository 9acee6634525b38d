"""Tensors that one call of a block is given: how they lie, and how replay finds them anew (rules R8, R12)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import nn

from adacc_hf.tape.tape import Source, geometry_of, has_storage
from adacc_hf.torch_glue.private import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    buffers_of,
    modules_of,
    parameters_of,
    storage_key,
)
from adacc_hf.torch_glue.tensors import PLAIN, local_of, runs_on_parts, storage_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def argument_tensors(args: Args, kwargs: Kwargs) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """(path, tensor) of every tensor among the arguments of a call, containers searched."""
    for position, argument in enumerate(args):
        yield from _leaves((position,), argument)
    for name, argument in kwargs.items():
        yield from _leaves((name,), argument)


def _leaves(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for index, item in enumerate(tree):
            yield from _leaves((*path, index), item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _leaves((*path, key), item)


def argument_layout(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Return how the tensor arguments of a call lie, containers searched.

    For each: path, shape, strides and offset (the layout where it is not strided), dtype, whether it wants gradients,
    and which of them share a storage.
    """
    storages: dict[int, int] = {}
    tensors = []
    for path, tensor in argument_tensors(args, kwargs):
        is_strided = tensor.layout is torch.strided
        storage = tensor.untyped_storage() if is_strided and type(tensor) in PLAIN else storage_of(tensor)
        alias = storages.setdefault(storage_key(storage), len(storages))
        place = (tensor.stride(), tensor.storage_offset()) if is_strided else tensor.layout
        tensors.append((path, tensor.shape, place, tensor.dtype, tensor.requires_grad, alias))
    return tuple(tensors)


def held_layout(block: nn.Module) -> Hashable:
    """Return how the tensors lie that hang on a block, and which of them share a storage: a tape views them so.

    Parameters and buffers most often have a storage each; DeepSpeed puts those of all blocks into one. What else hangs
    on the block (`held_tensors`) may be a table that grows.
    """
    storages: dict[int, int] = {}
    registers = [each for module in block.modules() for each in (parameters_of(module), buffers_of(module))]
    tensors = [local_of(tensor) for each in registers for tensor in each.values() if tensor is not None]
    tensors += [tensor for _, tensor in held_tensors(block)]
    return tuple(
        (storages.setdefault(storage_key(t.untyped_storage()), len(storages)), *geometry_of(t), t.dtype)
        for t in tensors
        if has_storage(t)
    )


def fetch(
    externals: Sequence[tuple[int, Source]], block: nn.Module, args: Args, kwargs: Kwargs
) -> list[tuple[int, torch.Tensor | None]]:
    """The inputs, parameters and buffers of this call, by value (rule R12)."""
    return [(value, find_external(source, block, args, kwargs)) for value, source in externals]


def find_external(source: Source, block: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """The tensor at `source` in this call of `block`, detached unless it is a parameter.

    What hangs on something may be gone: None, then.
    """
    if source.place == "module":
        return find_held(block.get_submodule(source.path[0]), source.path[1:])
    if source.place != "argument":
        path, name = _split(source.path[0])
        owner = _owner(block, path)
        if source.place == "buffer":
            return buffers_of(owner)[name].detach()  # `buffer.data = ...` leaves this one as it is
        parameter = parameters_of(owner)[name]
        return find_held(parameter, source.path[1:]) if source.place == "attached" else parameter
    return argument_at(source.path, args, kwargs).detach()


def argument_at(path: Sequence[Any], args: Args, kwargs: Kwargs) -> Any:
    first, *rest = path
    found = args[first] if isinstance(first, int) else kwargs[first]
    for step in rest:
        found = found[step]
    return found


@cache
def _split(name: str) -> tuple[tuple[str, ...], str]:
    """("mlp.c_fc.weight") -> (("mlp", "c_fc"), "weight")."""
    *path, last = name.split(".")
    return tuple(path), last


def _owner(block: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for step in path:
        block = modules_of(block)[step]
    return block


# Tensors that a block holds as neither parameter nor buffer: the scales of a quantized weight, an adapter's indices.
#
# They hang on its parameters and modules, in attributes, containers and small objects there, and a quantized weight of
# torchao is made of them. Each has a path, by which it is found anew at each call (rule R12). A call that puts another
# one in its place cannot be followed.

PLACES = ("attached", "module")
"""Of their sources: on a parameter, and on a module."""
_DEPTH = 2
"""Containers and objects between a module, or a parameter, and a tensor of its own."""
_REGISTERED = frozenset({PARAMETERS, BUFFERS, MODULES})


def held_tensors(block: nn.Module) -> Iterator[tuple[Source, torch.Tensor]]:
    """(source, tensor) of each of them, as they are now."""
    for name, parameter in block.named_parameters(remove_duplicate=False):
        if not runs_on_parts(type(parameter)):  # whose own part stands for it
            for path, tensor in _tensors_in(vars(parameter), _DEPTH):
                yield Source("attached", (name, *path)), tensor
    for name, module in block.named_modules():
        own = {attribute: value for attribute, value in vars(module).items() if attribute not in _REGISTERED}
        for path, tensor in _tensors_in(own, _DEPTH):
            yield Source("module", (name, *path)), tensor


def find_held(owner: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    """The tensor at `path` from a parameter or module, detached; None if there is none any more."""
    try:
        found = reduce(_step, path, owner)
    except (AttributeError, LookupError):
        return None
    return found.detach() if _is_plain(found) else None


def _step(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, (dict, list, tuple)) else getattr(owner, name)


def _tensors_in(owner: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    items = owner.items() if isinstance(owner, dict) else enumerate(owner)
    for name, found in items:
        if _is_plain(found):
            yield (name,), found
        if isinstance(found, torch.Tensor):
            continue
        inner = found if isinstance(found, (dict, list, tuple)) else getattr(found, "__dict__", None)
        if depth and inner and not isinstance(found, (type, nn.Module)):
            yield from (((name, *path), tensor) for path, tensor in _tensors_in(inner, depth - 1))


def _is_plain(found: Any) -> bool:
    """Whether it is a tensor that stands for itself: neither sparse nor divided among ranks."""
    return isinstance(found, torch.Tensor) and has_storage(found) and not runs_on_parts(type(found))
