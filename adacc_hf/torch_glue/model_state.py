"""Snapshots of the state that a model's Python code may change: numbers, containers, buffers, generators, hooks.

A profile, the gradient check and torch's checkpoint run blocks more often than training does, and restore the state
that these runs change. The search for state starts from modules, and follows attributes, containers and the objects in
them, class attributes, closures, and the globals that functions outside libraries name.
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
from pathlib import PurePath
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
from adacc_hf.torch_glue.private import BACKWARD_HOOKS, BUFFERS, PARAMETERS, version_of
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
    PYTHON_GENERATOR,
    SET,
    TORCH_GENERATOR,
    UNRESTORABLE,
    VERSION,
    Globals,
    Kind,
    cell_content,
    is_capturing,
    own_attributes,
)
from adacc_hf.torch_glue.zero3 import without_zero3

if TYPE_CHECKING:
    from adacc_hf.torch_glue.no_trace import Tables

LARGEST_COPY = 64 << 20
"""Maximum size in bytes of a tensor, other than a buffer, that a snapshot copies. Changes of larger tensors are
detected, but cannot be undone."""
SMALL_COPY = 64 << 10
"""Smaller maximum size in bytes, which replaces LARGEST_COPY for tensors that require a gradient, and for blocks whose
calls have changed no state so far."""
MAX_ITEMS = 4096
"""Maximum length of a container whose items are searched for state. Data sets are longer, but running a block does not
change their items."""

_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "PIL", "_pytest", "accelerate", "adacc_hf", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub",
    "hypothesis", "matplotlib", "numpy", "pandas", "peft", "pyarrow", "pytest", "safetensors", "scipy", "sklearn",
    "tensorboard", "tokenizers", "torch", "torchao", "tqdm", "transformers", "triton", "trl", "wandb",
}  # fmt: skip
"""Packages that are not searched for state, because running a model is assumed to change none of their objects, classes
and globals."""
_INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders of installed packages.

Objects of an installed package are searched for state, unless the package is in `_LIBRARIES`. The package's code is
searched only if one of the searched modules or roots belongs to the package. Code of other packages changes global
variables independently of the model: `filelock`, for example, counts the locks of the process.
"""

_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), Enum, range, slice, torch.dtype, torch.device, torch.layout,
    torch.Size, torch.memory_format, BuiltinFunctionType,
)  # fmt: skip


class _StateSearch:
    """Search for all mutable state that is reachable from the objects `roots`, such as modules and functions."""

    def __init__(self, roots: Iterable[Any], largest_copy: int, excluded: Iterable[Any]) -> None:
        roots = list(roots)
        self._largest_copy = largest_copy
        self.is_sharded = any(isinstance(root, nn.Module) and is_sharded(root) for root in roots)
        self.records: list[tuple[Kind, Any]] = []
        """(kind of state, object) of each object with state."""
        self.empty: list[dict[Any, Any]] = []
        """Empty dicts among the attributes of modules. Most of these dicts are for hooks."""
        self.leaves: dict[int, torch.Tensor] = {}
        """Leaf tensors, such as parameters, that may get a gradient, by id."""
        self.backward_hooks: list[dict[int, Any]] = []
        """Hooks that modules run in backward, by id: one dict for each kind of hooks of a module."""
        self._visited: dict[Any, Any] = {id(obj): obj for obj in excluded}
        self._packages: set[str] = set()
        """Installed packages whose code is searched."""
        self._skipped: dict[str, list[Callable[[], None]]] = {}
        """Postponed searches by installed package. A search runs if a module of its package is found among the searched
        objects."""
        for root in roots:
            self._search_code_of(root if isinstance(root, (type, FunctionType)) else type(root))
        self._queue = roots
        while self._queue:
            self._visit(self._queue.pop())
        # Postponed searches refer to this object. This cycle would keep the batch alive until garbage is collected.
        self._skipped.clear()
        self._visited.clear()

    def _visit(self, obj: Any) -> None:
        visit = _visitor_of(type(obj))
        if visit is not None and id(obj) not in self._visited:
            self._visited[id(obj)] = obj  # kept alive, so no other object gets the same id
            visit(self, obj)

    def _add(self, kind: Kind, obj: Any, inner: Iterable[Any] = ()) -> None:
        self.records.append((kind, obj))
        self._queue += inner

    def _search_code_of(self, obj: type | FunctionType) -> None:
        """Add the installed packages that define `obj` and its base classes to the packages whose code is searched. Run
        the searches of these packages that were postponed (`_skips`)."""
        for base in getattr(obj, "__mro__", (obj,)):
            package = _installed_package(base.__module__)
            if package is not None and package not in self._packages:
                self._packages.add(package)
                for search in self._skipped.pop(package, ()):
                    search()

    def _skips(self, module: Any, search: Callable[[], None]) -> bool:
        """Return True if the code of `module` is not searched for state, or not yet. If the module belongs to an
        installed package, postpone `search`: it runs if the package is searched later."""
        if _is_library_module(module):
            return True
        package = _installed_package(module)
        if package is None or package in self._packages:
            return False
        self._skipped.setdefault(package, []).append(search)
        return True

    def _module(self, module: nn.Module) -> None:
        self._search_code_of(type(module))
        entries = vars(module)
        self._add(LOCAL_ENTRIES if self.is_sharded else ENTRIES, entries)
        for name, value in without_zero3(entries).items():
            if isinstance(value, dict) and not value:
                self.empty.append(value)
            elif name in BACKWARD_HOOKS:
                self.backward_hooks.append(value)
                self._queue += value.values()
            elif name == PARAMETERS:
                self._add(LOCAL_ENTRIES if self.is_sharded else ENTRIES, value)
                parameters = [parameter for parameter in value.values() if parameter is not None]
                self.leaves |= {id(parameter): parameter for parameter in parameters}
                if not self.is_sharded:  # attributes of parameters: 8-bit layers keep their scales there
                    attributes = [vars(parameter) for parameter in parameters if vars(parameter)]
                    self.records += [(NAMES, Globals(each, each)) for each in attributes]
                if getattr(module, "max_norm", None) is not None:  # an embedding that scales its rows in forward
                    self.records += [(CONTENT, parameter) for parameter in parameters]
            elif name == BUFFERS:
                self._add(ENTRIES, value)
                for buffer in value.values():
                    self._tensor(buffer, is_buffer=True)
            else:
                self._queue.append(value)
        self._queue.append(type(module))

    def _tensor(self, tensor: torch.Tensor | None, is_buffer: bool = False) -> None:
        """Add a tensor to the found state: its content if the tensor can be copied, else only its version counter."""
        if tensor is None or isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            self.leaves |= {} if tensor is None else {id(tensor): tensor}
            return
        if is_buffer and id(tensor) in self._visited:
            return
        self._visited[id(tensor)] = tensor
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if tensor.is_meta or tensor.is_inference() or not (is_buffer or is_plain):
            return
        limit = SMALL_COPY if tensor.requires_grad else self._largest_copy
        is_small = tensor.nbytes <= limit or (is_buffer and self._largest_copy == LARGEST_COPY)
        distinct = _without_repeats(tensor) if is_plain else tensor
        can_be_copied = is_small and (not is_plain or not _has_overlapping_elements(distinct))
        self._add(CONTENT if can_be_copied else VERSION, distinct)

    def _dict(self, entries: dict[Any, Any]) -> None:
        self._add(ENTRIES, entries, entries.values() if len(entries) <= MAX_ITEMS else ())

    def _list(self, items: list[Any] | deque[Any]) -> None:
        self._add(ITEMS, items, items if len(items) <= MAX_ITEMS else ())

    def _set(self, items: set[Any]) -> None:
        self._add(SET, items, items if len(items) <= MAX_ITEMS else ())

    def _immutable(self, items: Iterable[Any]) -> None:
        self._queue += items

    def _function(self, function: FunctionType) -> None:
        """Search a Python function for state that it can change: its closure, defaults, attributes and globals."""
        self._queue += map(cell_content, function.__closure__ or ())
        if self._skips(function.__module__, partial(self._function_code, function)):  # for example a decorator
            return
        self._function_code(function)

    def _function_code(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        self.records += [(CELL, cell) for cell in cells]
        self._queue += function.__defaults__ or ()
        if function.__kwdefaults__:
            self._add(ENTRIES, function.__kwdefaults__, function.__kwdefaults__.values())
        if vars(function):
            self._add(ENTRIES, vars(function), vars(function).values())
        self._names(function.__globals__, _names_in_code(function.__code__))

    def _names(self, namespace: dict[str, Any], code_names: frozenset[str]) -> None:
        """Add the global variables that a function's code uses to the found state. If a variable is a module, also
        search this module. `namespace` contains the globals, and `code_names` the names that occur in the code."""
        names = Globals(namespace, code_names)
        for value in names.values():
            if not isinstance(value, ModuleType):
                self._queue.append(value)
            elif (id(value), code_names) not in self._visited:
                self._visited[(id(value), code_names)] = value
                search = partial(self._names, vars(value), code_names)
                if not self._skips(value.__name__, search):
                    search()
        if names.names:
            self._add(NAMES, names)

    def _method(self, method: MethodType) -> None:
        self._queue += (method.__self__, method.__func__)

    def _partial(self, call: partial[Any]) -> None:
        self._add(ENTRIES, call.keywords, call.keywords.values())
        self._queue += (call.func, *call.args)

    def _wrapper(self, wrapper: Any) -> None:
        self._queue += (getattr(wrapper, "__func__", None), getattr(wrapper, "fget", None))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            search = partial(self._class_attributes, base)
            if not self._skips(base.__module__, search):
                search()

    def _class_attributes(self, cls: type) -> None:
        self._add(ATTRIBUTES, cls, [value for name, value in vars(cls).items() if name != "__dict__"])

    def _object(self, obj: Any) -> None:
        if hasattr(obj, "__dict__"):
            self._add(ENTRIES, vars(obj), vars(obj).values())
        if slots := own_attributes(obj):
            self._add(ATTRIBUTES, obj, slots.values())
        self._queue.append(type(obj))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor that contains each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _has_overlapping_elements(tensor: torch.Tensor) -> bool:
    """Return True if elements of the tensor share memory, as in a view by `unfold`, so that the tensor cannot be
    restored."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > extent


@cache
def _names_in_code(code: CodeType) -> frozenset[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in_code, inner))


@cache
def _is_library_module(module: Any) -> bool:
    # `__module__` of a Cython function is a descriptor instead of a name.
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


@cache
def _installed_package(module: Any) -> str | None:
    """Return the top-level package of `module`, a module's name, if the package is installed. Return None for the
    user's code."""
    package = module.partition(".")[0] if isinstance(module, str) else ""
    place = getattr(sys.modules.get(package), "__file__", None) or ""
    return package if any(folder in PurePath(place).parts for folder in _INSTALLED) else None


def _state_visitor(kind: Kind) -> Callable[[_StateSearch, Any], None]:
    """Return a function that adds an object to the state that a search has found, as state of `kind`."""
    return lambda search, obj: search._add(kind, obj)


_VISITORS: list[tuple[tuple[type, ...], Callable[[_StateSearch, Any], None] | None]] = [
    (_ATOMS, None),
    ((nn.Module,), _StateSearch._module),
    ((torch.Tensor,), _StateSearch._tensor),
    ((dict,), _StateSearch._dict),
    ((list, deque), _StateSearch._list),
    ((set,), _StateSearch._set),
    ((tuple, frozenset), _StateSearch._immutable),
    ((FunctionType,), _StateSearch._function),
    ((MethodType,), _StateSearch._method),
    ((partial,), _StateSearch._partial),
    ((staticmethod, classmethod, property), _StateSearch._wrapper),
    ((torch.Generator,), _state_visitor(TORCH_GENERATOR)),
    ((random.Random,), _state_visitor(PYTHON_GENERATOR)),
    ((numpy.random.Generator, numpy.random.RandomState), _state_visitor(NUMPY_GENERATOR)),
    ((numpy.ndarray,), _state_visitor(ARRAY)),
    ((bytearray, array), _state_visitor(BYTES)),
    ((GeneratorType, itertools.count, type(iter([])), type(iter(())), type(iter(range(0)))), _state_visitor(ITERATOR)),
    ((type,), _StateSearch._class),
    ((SimpleNamespace, UserDict, UserList, PretrainedConfig), _StateSearch._object),
]


_visitor_cache: WeakKeyDictionary[type, Callable[[_StateSearch, Any], None] | None] = WeakKeyDictionary()


def _visitor_of(cls: type) -> Callable[[_StateSearch, Any], None] | None:
    if cls not in _visitor_cache:
        default = None if _is_library_module(cls.__module__) else _StateSearch._object
        _visitor_cache[cls] = next((visit for types, visit in _VISITORS if issubclass(cls, types)), default)
    return _visitor_cache[cls]


# Snapshots.


class ModelState:
    """Snapshot of all state reachable from `roots`, to restore the state after a model was run outside training.

    Roots are, for example, modules, functions, the arguments of a call, or a Trainer. Tensors of more than
    `largest_copy` bytes are not copied: changes of such tensors are detected, but cannot be restored. State that is
    reachable only through `excluded` objects is left out.
    """

    def __init__(self, roots: Iterable[Any], largest_copy: int = LARGEST_COPY, excluded: Iterable[Any] = ()) -> None:
        search = _StateSearch(roots, largest_copy, excluded)
        self.leaves = list(search.leaves.values())
        """Parameters and other leaf tensors that may get a gradient."""
        self.backward_hooks = search.backward_hooks
        """Hooks that modules run in backward, by id. A snapshot does not restore these dicts."""
        self._is_sharded = search.is_sharded
        self._empty = search.empty
        self.records = [(kind, obj, kind.take(obj)) for kind, obj in search.records]

    def watch_parameters(self) -> None:
        """Also detect in-place changes of parameters and other leaf tensors from now on."""
        copied_ids = {id(obj) for kind, obj, _ in self.records if kind is CONTENT}
        leaves = [leaf for leaf in self.leaves if id(leaf) not in copied_ids and not leaf.is_inference()]
        self.records += [(VERSION, leaf, version_of(leaf)) for leaf in leaves if not self._is_sharded]

    def changed(self) -> ModelState | None:
        """Return a new snapshot with only the state that has changed since this snapshot.

        Return None if no state has changed.

        Raise UnrestorableError for a change that cannot be undone.
        """
        part = copy.copy(self)
        part._empty = [entries for entries in self._empty if entries]
        part.records = [record for record in self.records if not record[0].same(record[1], record[2])]
        for kind, obj, before in part.records:
            if kind in UNRESTORABLE:
                kind.put(obj, before)
        return part if part._empty or part.records else None

    def restore(self, tables: Tables | None = None) -> None:
        """Restore the state of this snapshot, except for dict entries that `tables` retains, such as cached rotary
        embeddings.

        Raise UnrestorableError for a change that cannot be undone.
        """
        for kind, obj, before in self.records:
            has_entries = kind in (ENTRIES, LOCAL_ENTRIES)
            retained = tables.retained_entries(obj, before) if tables is not None and has_entries else {}
            target = {**before, **retained} if retained else before
            if kind is CONTENT or not kind.same(obj, target):
                kind.put(obj, target)
        for entries in self._empty:
            retained = {} if tables is None else {k: v for k, v in entries.items() if is_capturing(k, v)}
            entries.clear()
            entries.update(retained)

    @contextmanager
    def temporarily_restored(self) -> Iterator[None]:
        """Restore the state of this snapshot for the `with` block. After the block, restore the state that the model
        had before the block."""
        present = copy.copy(self)
        present.records = [(kind, obj, kind.take(obj)) for kind, obj, _ in self.records]
        present.records += [(ENTRIES, entries, dict(entries)) for entries in self._empty]
        present._empty = []
        self.restore()
        try:
            yield
        finally:
            present.restore()
