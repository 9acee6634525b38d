"""State that calls of a block change, such as buffers and counters. torch's checkpoint runs a block twice.

Values of buffers, and attributes of the block's modules that a call replaces, are restored for the second run. Items of
containers and states of a block's own generators are only compared: a block that changes these is not run twice
(`changes_in_place`). Globals, closures and objects of other classes are not searched.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy
import torch
from torch import nn

from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.private import buffers_of, version_of
from adacc_hf.torch_glue.tensors import is_fake
from adacc_hf.torch_glue.zero3 import without_zero3

log = logging.getLogger(__name__)

SMALL_COPY = 64 << 10
"""Maximum size in bytes of a tensor that is copied before each call. Larger tensors are copied before a block's first
call, and before later calls if the first one changed a large tensor."""
MAX_ITEMS, MAX_DEPTH = 256, 5  # length of a container whose items are compared, and depth of nested containers

_ABSENT: Any = object()
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, modules and hooks
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})

_changing: WeakSet[nn.Module] = WeakSet()  # blocks that must not be run twice
_has_large_changes: WeakKeyDictionary[nn.Module, tuple[bool, list[bool]]] = WeakKeyDictionary()
"""By block: (True if the latest call changed a large tensor, training flags of the block's modules in this call)."""
_reported: WeakSet[type[nn.Module]] = WeakSet()


def changes_in_place(block: nn.Module) -> bool:
    """Return True if a call of `block` changed state that cannot be restored, so that the block must not run twice."""
    return block in _changing


class BlockState:
    """Snapshot of the state of `block` before a call on `arguments`. `find_changes` compares it with the state after
    the call. A Python object that is reached in another way than by attributes of modules and containers is not seen.
    """

    def __init__(self, block: nn.Module, arguments: Any) -> None:
        self._block = block
        self._namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """(attributes or buffers of a module, their values before the call)."""
        self._tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor | None]] = {}
        """(name, tensor, version, copy) of each tensor of the block, by id."""
        self._contents: list[tuple[str, Any, Any]] = [("an argument", arguments, _content(arguments))]
        """(name, container or generator, what is compared)."""
        self.changed: list[tuple[dict[str, Any], str, Any]] = []
        """(attributes or buffers, name, value before) of each attribute that the call replaced."""
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(tensor, values before) of each tensor that the call wrote to."""
        self._flags = [module.training for module in block.modules()]
        has_large_changes, flags = _has_large_changes.get(block, (True, self._flags))
        self._limit = None if has_large_changes or flags != self._flags else SMALL_COPY
        sharded = is_sharded(block)
        for name, module in block.named_modules():
            if type(module).__name__ == "FullyShardedDataParallel":  # has a state of its own
                continue
            attributes = without_zero3(vars(module))
            own = {key: value for key, value in attributes.items() if key not in _INTERNAL}
            if sharded:  # FSDP sets and removes views of parameters around each forward
                own = {key: value for key, value in own.items() if not getattr(value, "requires_grad", False)}
            self._namespaces += [(vars(module), own), (buffers_of(module), dict(buffers_of(module)))]
            prefix = f"{name}." if name else ""
            for key, value in [*own.items(), *buffers_of(module).items()]:
                if isinstance(value, torch.Tensor):
                    self._note_tensor(prefix + key, value)
                elif type(value) not in _ATOMS and (content := _content(value)) is not value:
                    self._contents.append((prefix + key, value, content))

    def _note_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.requires_grad or tensor.is_meta or tensor.is_inference() or is_fake(tensor):
            return
        is_small = self._limit is None or tensor.nbytes <= self._limit
        copies = is_small and tensor.layout is torch.strided and not _overlaps(tensor)
        self._tensors[id(tensor)] = (name, tensor, version_of(tensor), tensor.detach().clone() if copies else None)

    def find_changes(self, compares_contents: bool = True) -> str | None:
        """Find the state that the call has changed. Return the name of state that cannot be restored, or None."""
        for namespace, before in self._namespaces:
            own = without_zero3(namespace)
            now = {key: value for key, value in own.items() if key in before or key not in _INTERNAL}
            for key in {**before, **now}:
                if now.get(key, _ABSENT) is not before.get(key, _ABSENT):
                    self.changed.append((namespace, key, before.get(key, _ABSENT)))
        contents = self._contents if compares_contents else []
        lost = [name for name, value, before in contents if _content(value) != before]
        for name, tensor, version, copy in self._tensors.values():
            if copy is None:
                lost += [name] if version_of(tensor) != version else []
            elif tensor.shape != copy.shape or not torch.equal(tensor, copy):
                self.written.append((tensor, copy))
        self._namespaces, self._tensors, self._contents = [], {}, []
        has_large_changes = any(copy.nbytes > SMALL_COPY for _, copy in self.written)
        _has_large_changes[self._block] = has_large_changes, self._flags
        if not lost:
            return None
        _changing.add(self._block)
        return lost[0]

    def restore(self) -> None:
        """Restore the state that the call has changed."""
        _assign(self.changed, self.written)

    @contextmanager
    def temporarily_restored(self) -> Iterator[None]:
        """Restore the state that the call has changed inside the `with` block, and the present state afterwards."""
        present = [(namespace, key, namespace.get(key, _ABSENT)) for namespace, key, _ in self.changed]
        values = [(tensor, tensor.detach().clone()) for tensor, _ in self.written]
        self.restore()
        try:
            yield
        finally:
            _assign(present, values)


def report_change(block: nn.Module, name: str) -> None:
    """Log once for each class of blocks that `block` keeps its tensors, because calls change `name`."""
    if type(block) not in _reported:
        _reported.add(type(block))
        log.warning(
            "Adacc: blocks of class %s keep their tensors, and do not run under torch's checkpoint, which would run "
            "them twice: forward changes %s. Use a buffer, or assign a new value to the attribute",
            type(block).__name__,
            name,
        )


def _assign(
    attributes: Iterable[tuple[dict[str, Any], str, Any]], tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for namespace, key, value in attributes:
        if value is _ABSENT:
            namespace.pop(key, None)
        else:
            namespace[key] = value
    for tensor, values in tensors:
        if tensor.shape == values.shape:
            tensor.data.copy_(values)  # hidden from autograd, as no backward of an earlier forward reads the tensor
        else:
            tensor.data = values.clone()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements of the tensor share memory, so that no copy can restore it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > extent


class _Same:
    """Object that equals only an object of this class for the same `value`, which it keeps alive."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _content(value: Any, depth: int = 0) -> Any:
    """Return an object that compares unequal if the items or the state of `value` have changed. For a value without
    items or state, return `value` itself at depth 0, else a `_Same`."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor) and depth:
        return _Same(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return repr(value.bit_generator.state if isinstance(value, numpy.random.Generator) else value.get_state())
    if isinstance(value, numpy.ndarray) and value.nbytes <= SMALL_COPY:
        return value.tobytes()
    if isinstance(value, Iterator):
        return object()  # equal to nothing, because reading its position would change it
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict | list | tuple | set | frozenset | deque) and depth < MAX_DEPTH:
        if len(value) > MAX_ITEMS:
            return len(value)
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return [_content(item, depth + 1) for item in items]
    return _Same(value) if depth else value
