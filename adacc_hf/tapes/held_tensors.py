"""Tensors that a block holds as neither parameter nor buffer: the scales of a quantized weight, an adapter's indices.

They hang on its parameters and modules, in attributes, containers and small objects there, and a quantized weight of
torchao is made of them. Each has a path, by which it is found anew at each call (rule R12). A call that puts another
one in its place cannot be followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import nn

from adacc_hf.tapes.local_tensors import runs_on_parts
from adacc_hf.tapes.tape import Source, has_storage

PLACES = ("attached", "module")
"""Of their sources: on a parameter, and on a module."""
_DEPTH = 2
"""Containers and objects between a module, or a parameter, and a tensor of its own."""
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


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
