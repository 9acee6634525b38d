"""What one call of a block is given: the key that tells shapes apart, and the tensors that replay reads (rules R8,
R12)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from adacc_hf.tapes.data_reads import Data, data_of
from adacc_hf.tapes.held_tensors import find_held
from adacc_hf.tapes.local_tensors import local_of, storage_of
from adacc_hf.tapes.tape import Source, has_storage

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_INERT = frozenset({"num_items_in_batch"})
"""Arguments that Transformers passes through blocks to the loss; they differ at every step and change nothing here."""
_REGISTERS = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
"""Where a module has what decides which operators it runs."""
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")


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


class StatePaths:
    """The names of a block's parameters, for looking the tensors up anew at each call at the cost of dict accesses.

    They are those of its modules as they are now: adapters, pruning and parametrizations put others in their places.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = dict(block.named_modules())
        registers = [module._parameters for module in modules.values()]
        self._parameters = [(each, name) for each in registers for name, given in each.items() if given is not None]
        self._registers = [vars(module)[name] for module in modules.values() for name in _REGISTERS]
        self._filled = [register for register in self._registers if register]  # most are empty, and counted only
        self._children = [module._modules for module in modules.values() if module._modules]
        self._before = self._content()
        self.structure = hash(tuple((path, *_made_of(module)) for path, module in modules.items()))
        """The same for blocks of the same modules, with the same names and hooks."""

    def are_current(self) -> bool:
        """Whether the block still has the modules that it had, and these their parameters, buffers and hooks."""
        return self._content() == self._before

    def _content(self) -> tuple[list[int], list[str | int], list[nn.Module | None]]:
        names, modules = map(_KEYS, self._filled), map(_VALUES, self._children)
        return list(map(len, self._registers)), list(chain.from_iterable(names)), list(chain.from_iterable(modules))

    def want_gradients(self) -> tuple[bool, ...]:
        """Which parameters want gradients, while these paths are current."""
        return tuple([register[name].requires_grad for register, name in self._parameters])


def call_key(paths: StatePaths, args: Args, kwargs: Kwargs) -> Any:
    """What the operators of a call depend on, as far as it can be told without running it (rule R8).

    Shapes, strides, dtypes, offsets and gradients of the tensor arguments, which of them share a storage, numbers and
    names among the other arguments, containers searched, autocast, what the block is made of, and which of its
    parameters want gradients.
    """
    storages: dict[int, int] = {}
    tensors = []
    device_type = "cpu"
    for path, tensor in argument_tensors(args, kwargs):
        alias = storages.setdefault(storage_of(tensor)._cdata, len(storages))
        device_type = tensor.device.type
        is_strided = tensor.layout is torch.strided
        place = (tensor.stride(), tensor.storage_offset()) if is_strided else tensor.layout
        tensors.append((path, tensor.shape, place, tensor.dtype, tensor.requires_grad, alias))
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    plain = [_plain(value) for value in args]
    plain += [_plain(value) for name, value in kwargs.items() if name not in _INERT]
    return tuple(tensors), tuple(plain), autocast, paths.structure, paths.want_gradients()


def _made_of(module: nn.Module) -> tuple[Any, ...]:
    """A module's class, names and hooks, all by name: parametrize makes each module a class of its own."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    names = [*module._parameters, None, *module._buffers, None, *map(_name_of, hooks)]
    return _name_of(type(module)), tuple(names)


def _name_of(code: Any) -> str:
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


def state_layout(block: nn.Module) -> Hashable:
    """Where in which storages the block's parameters and buffers are, which a tape's views of them depend on.

    Most often each has its own; DeepSpeed puts those of all blocks into one.
    """
    storages: dict[int, int] = {}
    tensors = [local_of(tensor) for tensor in (*block.parameters(), *block.buffers())]
    return tuple(
        (storages.setdefault(t.untyped_storage()._cdata, len(storages)), t.storage_offset(), t.stride())
        for t in tensors
        if has_storage(t)
    )


def fetch(
    externals: Sequence[tuple[int, Source]], block: nn.Module, args: Args, kwargs: Kwargs
) -> list[tuple[int, torch.Tensor]]:
    """The inputs, parameters and buffers of this call, by value (rule R12)."""
    return [(value, find_external(source, block, args, kwargs)) for value, source in externals]


def find_external(source: Source, block: nn.Module, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """The tensor at `source` in this call of `block`, detached unless it is a parameter.

    What hangs on something may be gone: None, then.
    """
    if source.place == "module":
        return find_held(block.get_submodule(source.path[0]), source.path[1:])
    if source.place != "argument":
        path, name = _split(source.path[0])
        owner = _owner(block, path)
        if source.place == "buffer":
            return owner._buffers[name].detach()  # `buffer.data = ...` leaves this one as it is
        parameter = owner._parameters[name]
        return find_held(parameter, source.path[1:]) if source.place == "attached" else parameter
    return _argument(source.path, args, kwargs).detach()


def data_at(path: Sequence[Any], args: Args, kwargs: Kwargs) -> Data | None:
    """The data of the argument at `path`; None if this call has no such tensor, or one that nobody compares."""
    try:
        return data_of(_argument(path, args, kwargs))
    except (LookupError, TypeError):
        return None


def _argument(path: Sequence[Any], args: Args, kwargs: Kwargs) -> Any:
    first, *rest = path
    found = args[first] if isinstance(first, int) else kwargs[first]
    for step in rest:
        found = found[step]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str)) else None


@cache
def _split(name: str) -> tuple[tuple[str, ...], str]:
    """("mlp.c_fc.weight") -> (("mlp", "c_fc"), "weight")."""
    *path, last = name.split(".")
    return tuple(path), last


def _owner(block: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for step in path:
        block = block._modules[step]
    return block
