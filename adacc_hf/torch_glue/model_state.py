"""Snapshots of the state that a model's Python code may change: numbers, containers, buffers, generators, hooks.

A profile, the gradient check and torch's checkpoint run blocks more often than training does, and put back the state
that such a run changes. The search for state starts from modules. It follows attributes, containers and objects in
them, class attributes, closures, and the globals that functions outside of libraries name.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import nn
from transformers import PretrainedConfig

from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.private import BUFFERS, PARAMETERS, version_of
from adacc_hf.torch_glue.state_kinds import (
    ARRAY,
    ATTRIBUTES,
    BYTES,
    CELL,
    CONTENT,
    ENTRIES,
    ITEMS,
    ITERATOR,
    LOCAL_ENTRIES,
    NAMES,
    NUMPY_GENERATOR,
    ONLY_NOTICED,
    PYTHON_GENERATOR,
    SET,
    TORCH_GENERATOR,
    VERSION,
    Globals,
    Kind,
    cell_content,
    is_capturing,
    own_attributes,
)

if TYPE_CHECKING:
    from adacc_hf.torch_glue.no_trace import Tables

LARGEST_COPY = 64 << 20
"""Largest tensor, in bytes, that is copied if it is no buffer. Of a larger one only a change is noticed."""
SMALL_COPY = 64 << 10
"""The same for a tensor that requires a gradient, and within a block whose calls have changed nothing so far."""
MANY = 4096
"""Most items of a container that are searched. A data set has more, and blocks do not change its items."""

_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "PIL", "_pytest", "accelerate", "adacc_hf", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub",
    "hypothesis", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "pytest", "safetensors", "scipy", "sklearn",
    "tensorboard", "tokenizers", "torch", "torchao", "tqdm", "transformers", "triton", "trl", "wandb",
}  # fmt: skip
"""Packages whose classes and globals are taken to hold no state that a block changes."""

_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), Enum, range, slice, torch.dtype, torch.device, torch.layout,
    torch.Size, torch.memory_format, BuiltinFunctionType,
)  # fmt: skip


class _Search:
    """Search for all state within reach of some objects."""

    def __init__(self, roots: Iterable[Any], largest_copy: int, besides: Iterable[Any]) -> None:
        roots = list(roots)
        self._largest_copy = largest_copy
        self.is_sharded = any(isinstance(root, nn.Module) and is_sharded(root) for root in roots)
        self.found: list[tuple[Kind, Any]] = []
        """(kind, object) of each piece of state."""
        self.empty: list[dict[Any, Any]] = []
        """Empty dicts of modules, most of them for hooks."""
        self.leaves: dict[int, torch.Tensor] = {}
        """Tensors that may get a gradient, by id."""
        self._reached: dict[Any, Any] = {id(thing): thing for thing in besides}
        self._waiting = roots
        while self._waiting:
            self._reach(self._waiting.pop())

    def _reach(self, thing: Any) -> None:
        look = _look_at(type(thing))
        if look is not None and id(thing) not in self._reached:
            self._reached[id(thing)] = thing  # kept alive, so that no other object gets its id
            look(self, thing)

    def _add(self, kind: Kind, thing: Any, inner: Iterable[Any] = ()) -> None:
        self.found.append((kind, thing))
        self._waiting += inner

    def _module(self, module: nn.Module) -> None:
        entries = vars(module)
        self._add(LOCAL_ENTRIES if self.is_sharded else ENTRIES, entries)
        for name, value in entries.items():
            if isinstance(value, dict) and not value:
                self.empty.append(value)
            elif name == PARAMETERS:
                self._add(LOCAL_ENTRIES if self.is_sharded else ENTRIES, value)
                parameters = [parameter for parameter in value.values() if parameter is not None]
                self.leaves |= {id(parameter): parameter for parameter in parameters}
                if not self.is_sharded:  # attributes of parameters: 8-bit layers take their scales off them
                    attributes = [vars(parameter) for parameter in parameters if vars(parameter)]
                    self.found += [(NAMES, Globals(each, each)) for each in attributes]
                if getattr(module, "max_norm", None) is not None:  # an embedding that scales its rows in forward
                    self.found += [(CONTENT, parameter) for parameter in parameters]
            elif name == BUFFERS:
                self._add(ENTRIES, value)
                for buffer in value.values():
                    self._tensor(buffer, is_buffer=True)
            else:
                self._waiting.append(value)
        self._waiting.append(type(module))

    def _tensor(self, tensor: torch.Tensor | None, is_buffer: bool = False) -> None:
        if tensor is None or isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            self.leaves |= {} if tensor is None else {id(tensor): tensor}
            return
        if is_buffer and id(tensor) in self._reached:
            return
        self._reached[id(tensor)] = tensor
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if tensor.is_meta or tensor.is_inference() or not (is_buffer or is_plain):
            return
        most = SMALL_COPY if tensor.requires_grad else self._largest_copy
        is_small = tensor.nbytes <= most or (is_buffer and self._largest_copy == LARGEST_COPY)
        once = _without_repeats(tensor) if is_plain else tensor
        can_be_copied = is_small and (not is_plain or not _overlaps(once))
        self._add(CONTENT if can_be_copied else VERSION, once)

    def _dict(self, entries: dict[Any, Any]) -> None:
        self._add(ENTRIES, entries, entries.values() if len(entries) <= MANY else ())

    def _list(self, items: list[Any] | deque[Any]) -> None:
        self._add(ITEMS, items, items if len(items) <= MANY else ())

    def _set(self, items: set[Any]) -> None:
        self._add(SET, items, items if len(items) <= MANY else ())

    def _fixed(self, items: Iterable[Any]) -> None:
        self._waiting += items

    def _function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        self._waiting += map(cell_content, cells)
        if _is_library(function.__module__):  # a decorator, say
            return
        self.found += [(CELL, cell) for cell in cells]
        self._waiting += function.__defaults__ or ()
        if function.__kwdefaults__:
            self._add(ENTRIES, function.__kwdefaults__, function.__kwdefaults__.values())
        if vars(function):
            self._add(ENTRIES, vars(function), vars(function).values())
        self._names(function.__globals__, _names_in(function.__code__))

    def _names(self, namespace: dict[str, Any], mentioned: frozenset[str]) -> None:
        names = Globals(namespace, mentioned)
        for value in names.values():
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not _is_library(value.__name__) and (id(value), mentioned) not in self._reached:
                self._reached[(id(value), mentioned)] = value
                self._names(vars(value), mentioned)
        if names.names:
            self._add(NAMES, names)

    def _method(self, method: MethodType) -> None:
        self._waiting += (method.__self__, method.__func__)

    def _partial(self, call: partial[Any]) -> None:
        self._add(ENTRIES, call.keywords, call.keywords.values())
        self._waiting += (call.func, *call.args)

    def _wrapper(self, wrapper: Any) -> None:
        self._waiting += (getattr(wrapper, "__func__", None), getattr(wrapper, "fget", None))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not _is_library(base.__module__):
                values = [value for name, value in vars(base).items() if name != "__dict__"]
                self._add(ATTRIBUTES, base, values)

    def _object(self, thing: Any) -> None:
        if hasattr(thing, "__dict__"):
            self._add(ENTRIES, vars(thing), vars(thing).values())
        if slots := own_attributes(thing):
            self._add(ATTRIBUTES, thing, slots.values())
        self._waiting.append(type(thing))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that has each element of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements share memory, as those of `unfold` do, so that they cannot be written one by one."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > extent


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that a function's code mentions, inner functions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


@cache
def _is_library(module: Any) -> bool:
    # Cython's functions have a descriptor in the place of the name.
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


def _adds(kind: Kind) -> Callable[[_Search, Any], None]:
    return lambda search, thing: search._add(kind, thing)


_BY_TYPE: list[tuple[tuple[type, ...], Callable[[_Search, Any], None] | None]] = [
    (_ATOMS, None),
    ((nn.Module,), _Search._module),
    ((torch.Tensor,), _Search._tensor),
    ((dict,), _Search._dict),
    ((list, deque), _Search._list),
    ((set,), _Search._set),
    ((tuple, frozenset), _Search._fixed),
    ((FunctionType,), _Search._function),
    ((MethodType,), _Search._method),
    ((partial,), _Search._partial),
    ((staticmethod, classmethod, property), _Search._wrapper),
    ((torch.Generator,), _adds(TORCH_GENERATOR)),
    ((random.Random,), _adds(PYTHON_GENERATOR)),
    ((numpy.random.Generator, numpy.random.RandomState), _adds(NUMPY_GENERATOR)),
    ((numpy.ndarray,), _adds(ARRAY)),
    ((bytearray, array), _adds(BYTES)),
    ((GeneratorType, itertools.count, type(iter([])), type(iter(())), type(iter(range(0)))), _adds(ITERATOR)),
    ((type,), _Search._class),
    ((SimpleNamespace, UserDict, UserList, PretrainedConfig), _Search._object),
]


_looks: WeakKeyDictionary[type, Callable[[_Search, Any], None] | None] = WeakKeyDictionary()


def _look_at(cls: type) -> Callable[[_Search, Any], None] | None:
    """Return the method that searches an object of type `cls`; None if such objects hold no state."""
    if cls not in _looks:
        default = None if _is_library(cls.__module__) else _Search._object
        _looks[cls] = next((look for types, look in _BY_TYPE if issubclass(cls, types)), default)
    return _looks[cls]


# Snapshots.


class ModelState:
    """Snapshot of the state within reach of `roots`: modules, functions, arguments of a call, a Trainer.

    State that is reached only through `besides` is left out.
    """

    def __init__(self, roots: Iterable[Any], largest_copy: int = LARGEST_COPY, besides: Iterable[Any] = ()) -> None:
        search = _Search(roots, largest_copy, besides)
        self.leaves = list(search.leaves.values())
        """Parameters and other tensors that may get a gradient."""
        self._is_sharded = search.is_sharded
        self._empty = search.empty
        self._records = [(kind, thing, kind.take(thing)) for kind, thing in search.found]

    def watch_parameters(self) -> None:
        """Notice in-place changes of parameters too."""
        copied = {id(thing) for kind, thing, _ in self._records if kind is CONTENT}
        watched = [leaf for leaf in self.leaves if id(leaf) not in copied and not leaf.is_inference()]
        self._records += [(VERSION, leaf, version_of(leaf)) for leaf in watched if not self._is_sharded]

    def changed(self) -> ModelState | None:
        """Return the part of this state that differs from the present state; None if none does.

        Raises UnrestorableError for a change that cannot be put back.
        """
        part = copy.copy(self)
        part._empty = [entries for entries in self._empty if entries]
        part._records = [each for each in self._records if not each[0].same(each[1], each[2])]
        for kind, thing, before in part._records:
            if kind in ONLY_NOTICED:
                kind.put(thing, before)
        return part if part._empty or part._records else None

    def restore(self, tables: Tables | None = None) -> None:
        """Put this state back, except for entries that `tables` keeps."""
        for kind, thing, before in self._records:
            has_entries = kind in (ENTRIES, LOCAL_ENTRIES)
            kept = tables.of(thing, before) if tables is not None and has_entries else {}
            wanted = {**before, **kept} if kept else before
            if kind is CONTENT or not kind.same(thing, wanted):
                kind.put(thing, wanted)
        for entries in self._empty:
            kept = {} if tables is None else {k: v for k, v in entries.items() if is_capturing(k, v)}
            entries.clear()
            entries.update(kept)

    @contextmanager
    def back_for_a_while(self) -> Iterator[None]:
        """While open, the model has this state. Afterwards it has its present one again."""
        now = copy.copy(self)
        now._records = [(kind, thing, kind.take(thing)) for kind, thing, _ in self._records]
        now._records += [(ENTRIES, entries, dict(entries)) for entries in self._empty]
        now._empty = []
        self.restore()
        try:
            yield
        finally:
            now.restore()
