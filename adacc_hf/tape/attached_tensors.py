"""Attached tensors of a block, such as the scales of a quantized weight.

Attached tensors are stored on the block's modules or parameters, and are not registered as parameters or buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import nn

from adacc_hf.tape.tape import Source, has_storage
from adacc_hf.torch_glue.private import BUFFERS, MODULES, PARAMETERS
from adacc_hf.torch_glue.tensors import runs_on_parts
from adacc_hf.torch_glue.zero3 import without_zero3

PLACES = ("attached", "module")
"""Values of `Source.place`, which says where a call finds a tensor, for attached tensors: "attached" for a tensor on a
parameter, "module" for a tensor on a module."""
_DEPTH = 2
"""Search depth: the maximum number of containers and objects between a module or parameter and an attached tensor."""
_REGISTERED = frozenset({PARAMETERS, BUFFERS, MODULES})


def attached_tensors(block: nn.Module) -> Iterator[tuple[Source, torch.Tensor]]:
    """Yield (source, tensor) of each tensor attached to the block's modules and parameters. The source says where a
    call finds it.

    Attached tensors, such as the scales of a quantized weight, are not registered as parameters or buffers.
    """
    for name, parameter in block.named_parameters(remove_duplicate=False):
        if not runs_on_parts(type(parameter)):  # a DTensor is represented by its local tensor
            for path, tensor in _attached_tensors_in(without_zero3(vars(parameter)), _DEPTH):
                yield Source("attached", (name, *path)), tensor
    for path_of_module, module in block.named_modules():
        own = {name: value for name, value in without_zero3(vars(module)).items() if name not in _REGISTERED}
        for path, tensor in _attached_tensors_in(own, _DEPTH):
            yield Source("module", (path_of_module, *path)), tensor


def find_attached(owner: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the tensor that is attached to the parameter or module `owner` at `path`, detached from autograd's graph.

    `path` contains attribute names, and keys or indices of containers. Return None if the tensor no longer exists.
    """
    try:
        tensor = reduce(_path_step, path, owner)
    except (AttributeError, LookupError):
        return None
    return tensor.detach() if _is_plain_tensor(tensor) else None


def _path_step(owner: Any, name: Any) -> Any:
    """Return the item or attribute `name` of `owner`. A path to an attached tensor consists of such names."""
    return owner[name] if isinstance(owner, (dict, list, tuple)) else getattr(owner, name)


def _attached_tensors_in(owner: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield (path, tensor) of each plain tensor in the dict or sequence `owner`, or nested in its items up to `depth`
    levels deep."""
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
