"""Tensors that a block's call reads: arguments, parameters, buffers, and tensors attached to the block.

A call may run on a tape only if its tensors have the layout on the tape (rule R8), so the layout is a part of the
call's key. Each call looks up again the tensors that its replay reads, because they may have been replaced since the
last call (rule R12).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache, reduce
from operator import getitem
from typing import Any

import torch
from torch import nn

from adacc_hf.tape.tape import Source, geometry_of, has_storage
from adacc_hf.torch_glue.private import BUFFERS, MODULES, PARAMETERS, buffers_of, modules_of, parameters_of, storage_key
from adacc_hf.torch_glue.tensors import PLAIN, local_of, runs_on_parts, storage_of
from adacc_hf.torch_glue.zero3 import without_zero3

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def argument_tensors(args: Args, kwargs: Kwargs) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield (path, tensor) of every tensor among the arguments of a call, including tensors in containers."""
    for position, argument in enumerate(args):
        yield from _argument_leaves((position,), argument)
    for name, argument in kwargs.items():
        yield from _argument_leaves((name,), argument)


def _argument_leaves(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for index, item in enumerate(tree):
            yield from _argument_leaves((*path, index), item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _argument_leaves((*path, key), item)


def argument_layout(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Return the layout of the tensor arguments of a call, including tensors in containers.

    For each tensor: path, shape, strides and offset (or `layout` if not strided), dtype, `requires_grad`, and the
    number of its storage. Tensors that share a storage have the same number.
    """
    storages: dict[int, int] = {}
    tensors = []
    for path, tensor in argument_tensors(args, kwargs):
        is_strided = tensor.layout is torch.strided
        storage = tensor.untyped_storage() if is_strided and type(tensor) in PLAIN else storage_of(tensor)
        alias = storages.setdefault(storage_key(storage), len(storages))
        strides = (tensor.stride(), tensor.storage_offset()) if is_strided else tensor.layout
        tensors.append((path, tensor.shape, strides, tensor.dtype, tensor.requires_grad, alias))
    return tuple(tensors)


def block_layout(block: nn.Module) -> Hashable:
    """Return the geometry, dtype, storage number and `requires_grad` of each of the block's own tensors, on which the
    views recorded on a tape depend. Tensors that share a storage have the same number.

    A layout can change: DeepSpeed moves the parameters of all blocks into one storage, and attached tables may grow.
    """
    storages: dict[int, int] = {}
    registers = [register for module in block.modules() for register in (parameters_of(module), buffers_of(module))]
    tensors = [local_of(tensor) for register in registers for tensor in register.values() if tensor is not None]
    tensors += [tensor for _, tensor in attached_tensors(block)]
    return tuple(
        (storages.setdefault(storage_key(t.untyped_storage()), len(storages)), geometry_of(t), t.dtype, t.requires_grad)
        for t in tensors
        if has_storage(t)
    )


def find_external(source: Source, block: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """Return the tensor at `source`, a place such as a parameter's name, in this call of `block`, detached unless it is
    a parameter. Return None if an attached tensor no longer exists."""
    if source.place == "module":
        return find_attached(block.get_submodule(source.path[0]), source.path[1:])
    if source.place != "argument":
        path, name = _split_state_name(source.path[0])
        owner = block
        for step in path:
            owner = modules_of(owner)[step]
        if source.place == "buffer":
            return buffers_of(owner)[name].detach()  # a later `buffer.data = ...` does not change the detached tensor
        # `[]` of ZeRO 3's tables gathers a partitioned parameter, for which DeepSpeed waits for all ranks.
        parameter = dict.__getitem__(parameters_of(owner), name)
        return find_attached(parameter, source.path[1:]) if source.place == "attached" else parameter
    first, *rest = source.path
    return reduce(getitem, rest, args[first] if isinstance(first, int) else kwargs[first]).detach()


@cache
def _split_state_name(name: str) -> tuple[tuple[str, ...], str]:
    """Split the name of a block's parameter: "mlp.c_fc.weight" -> (("mlp", "c_fc"), "weight")."""
    *path, last = name.split(".")
    return tuple(path), last


# Attached tensors: stored on modules or parameters without being registered, such as the scales of a quantized weight.

PLACES = ("attached", "module")
"""Values of `Source.place` of attached tensors: "attached" for one on a parameter, "module" for one on a module."""
_DEPTH = 2
"""Maximum number of containers and objects between a module or parameter and an attached tensor."""
_REGISTERED = frozenset({PARAMETERS, BUFFERS, MODULES})


def attached_tensors(block: nn.Module) -> Iterator[tuple[Source, torch.Tensor]]:
    """Yield (source, tensor) of each tensor attached to the block's modules and parameters."""
    for name, parameter in block.named_parameters(remove_duplicate=False):
        if not runs_on_parts(type(parameter)):  # a DTensor is represented by its local tensor
            for path, tensor in _attached_tensors_in(without_zero3(vars(parameter)), _DEPTH):
                yield Source("attached", (name, *path)), tensor
    for path_of_module, module in block.named_modules():
        own = {name: value for name, value in without_zero3(vars(module)).items() if name not in _REGISTERED}
        for path, tensor in _attached_tensors_in(own, _DEPTH):
            yield Source("module", (path_of_module, *path)), tensor


def find_attached(owner: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the detached tensor at `path` (names, keys, indices) below `owner`, or None if it is gone."""
    try:
        tensor = owner
        for name in path:
            tensor = tensor[name] if isinstance(tensor, (dict, list, tuple)) else getattr(tensor, name)
    except (AttributeError, LookupError):
        return None
    return tensor.detach() if _is_plain_tensor(tensor) else None


def _attached_tensors_in(owner: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield (path, tensor) of each plain tensor in the dict or sequence `owner`, up to `depth` levels deep."""
    items = owner.items() if isinstance(owner, dict) else enumerate(owner)
    for name, item in items:
        if _is_plain_tensor(item):
            yield (name,), item
        if isinstance(item, torch.Tensor):
            continue
        inner = item if isinstance(item, (dict, list, tuple)) else getattr(item, "__dict__", None)
        if depth and inner and not isinstance(item, (type, nn.Module)):
            yield from (((name, *path), tensor) for path, tensor in _attached_tensors_in(inner, depth - 1))


def _is_plain_tensor(item: Any) -> bool:
    """Return True if `item` may be recorded as an attached tensor: not sparse, quantized or sharded."""
    return isinstance(item, torch.Tensor) and has_storage(item) and not runs_on_parts(type(item))
