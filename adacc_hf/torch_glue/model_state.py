"""Snapshots of the state that a model's Python code may change: numbers, containers, buffers, generators, hooks.

A profile, the gradient check and torch's checkpoint run blocks more often than training does. What such a run changes
is put back. State is found from the modules: attributes, containers and objects in them, class attributes, closures,
and the globals that functions outside of libraries name.
"""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import random
import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from operator import is_, length_hint
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import nn
from transformers import PretrainedConfig

from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.torch_glue.private import BUFFERS, PARAMETERS, version_of
from adacc_hf.torch_glue.ranks import is_sharded

if TYPE_CHECKING:
    from adacc_hf.torch_glue.no_trace import Tables

LARGEST_COPY = 64 << 20
"""Bytes of a tensor that is no buffer, up to which it is copied. Of a larger one only a change is noticed."""
SMALL_COPY = 64 << 10
"""The same for a tensor with a gradient, and within a block whose calls have changed nothing so far."""
MANY = 4096
"""Items of a container, up to which they are searched too. A data set has more, and blocks do not change its items."""

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
_ABSENT: Any = object()


# How each kind of state is taken, compared and put back.


class _Kind(NamedTuple):
    """Functions of one kind of state. `same` and `put` get the object, and what `take` has returned of it."""

    take: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]


def _same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _same_entries(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return _same_items(now.values(), before.values()) and list(now) == list(before)


def _put_entries(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(now) != list(before):
        now.clear()
    for name, value in before.items():  # the `update` of a Counter adds
        now[name] = value


def _put_items(now: Any, before: Any) -> None:
    now.clear()
    (now.update if isinstance(now, set) else now.extend)(before)


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _put_cell(cell: CellType, before: Any) -> None:
    if before is not _ABSENT:
        cell.cell_contents = before
    elif _cell_content(cell) is not _ABSENT:
        del cell.cell_contents


def _own_attributes(owner: Any) -> dict[str, Any]:
    """Data attributes of a class itself, or the slots of an object."""
    if isinstance(owner, type):
        is_data = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        return {name: value for name, value in is_data.items() if not hasattr(value, "__get__")}
    names = [name for cls in type(owner).__mro__ for name in _slots_of(cls)]
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _put_attributes(owner: Any, before: dict[str, Any]) -> None:
    now = _own_attributes(owner)
    for name in now.keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if now.get(name, _ABSENT) is not value:
            setattr(owner, name, value)


class _Globals:
    """The names of a namespace that a function mentions."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        self.namespace = namespace
        self.names = [name for name in names if name in namespace]

    def values(self) -> list[Any]:
        return [self.namespace.get(name, _ABSENT) for name in self.names]

    def put(self, before: list[Any]) -> None:
        self.namespace.update(zip(self.names, before, strict=True))


def _put_content(tensor: torch.Tensor, before: torch.Tensor) -> None:
    # By way of `.data`: a change that autograd need not know, since it comes between no forward and its backward.
    if tensor.shape == before.shape:
        tensor.data.copy_(before)
    else:
        tensor.data = before.clone()


def _refuse_change(tensor: torch.Tensor, before: int) -> None:
    if isinstance(tensor, nn.Parameter):
        advice = "change parameters outside of forward, in the training step"
    else:
        advice = "write into a copy if it is an argument, and make it a buffer (register_buffer) if a module holds it"
    raise UnrestorableError(
        f"forward changes in place a tensor of size {tuple(tensor.shape)}, of which there is no copy to put back: "
        f"{advice}, or train without adacc_hf"
    )


def _position(iterator: Any) -> Any:
    """Where an iterator stands, as far as anything tells."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if not isinstance(iterator, GeneratorType):
        return length_hint(iterator)
    frame, inner = iterator.gi_frame, iterator.gi_yieldfrom
    if frame is None:
        return None
    return frame.f_lasti, list(map(id, frame.f_locals.values())), length_hint(inner, -1)


def _refuse_advance(iterator: Any, before: Any) -> None:
    raise UnrestorableError(
        f"forward advances {iterator!r:.80}, which nothing can take back: keep a number or a list with an index in the "
        f"place of this iterator, or train without adacc_hf"
    )


def _numpy_state(generator: Any) -> bytes:
    is_new = isinstance(generator, numpy.random.Generator)
    return pickle.dumps(generator.bit_generator.state if is_new else generator.get_state(legacy=False))


def _put_numpy_state(generator: Any, before: bytes) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = pickle.loads(before)
    else:
        generator.set_state(pickle.loads(before))


def _local(entries: dict[Any, Any]) -> dict[Any, Any]:
    """Entries but for parameters, and views of them, which FSDP puts in place and takes away around each forward."""
    return {
        name: value
        for name, value in entries.items()
        if not (isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)))
    }


def _put_local(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in _local(now).keys() - before.keys():
        del now[name]
    now.update(before)


_ENTRIES = _Kind(dict, _same_entries, _put_entries)
_LOCAL_ENTRIES = _Kind(_local, lambda now, before: _same_entries(_local(now), before), _put_local)
"""Those of modules whose parameters are sharded."""
_ITEMS = _Kind(list, _same_items, _put_items)
_SET = _Kind(set, lambda now, before: now == before, _put_items)
_CELL = _Kind(_cell_content, lambda cell, before: _cell_content(cell) is before, _put_cell)
_ATTRIBUTES = _Kind(
    _own_attributes, lambda owner, before: _same_entries(_own_attributes(owner), before), _put_attributes
)
_NAMES = _Kind(_Globals.values, lambda names, before: _same_items(names.values(), before), _Globals.put)
_CONTENT = _Kind(lambda tensor: tensor.detach().clone(), torch.equal, _put_content)
_VERSION = _Kind(version_of, lambda tensor, before: version_of(tensor) == before, _refuse_change)
_ARRAY = _Kind(
    numpy.array, lambda now, before: now.tobytes() == before.tobytes(), lambda now, before: numpy.copyto(now, before)
)
_BYTES = _Kind(lambda now: now[:], operator.eq, lambda now, before: operator.setitem(now, slice(None), before))
_TORCH_GENERATOR = _Kind(
    torch.Generator.clone_state,  # no tensor, which would be live and counted
    lambda now, before: torch.equal(now.get_state(), before.get_state()),
    lambda now, before: now.set_state(before.get_state()),
)
_PYTHON_GENERATOR = _Kind(
    random.Random.getstate, lambda now, before: now.getstate() == before, lambda now, before: now.setstate(before)
)
_NUMPY_GENERATOR = _Kind(_numpy_state, lambda now, before: _numpy_state(now) == before, _put_numpy_state)
_ITERATOR = _Kind(_position, lambda now, before: _position(now) == before, _refuse_advance)
_ONLY_NOTICED = (_VERSION, _ITERATOR)


# Finding it.


class _Search:
    """All state within reach of some objects, as (kind, object)."""

    def __init__(self, roots: Iterable[Any], largest_copy: int, besides: Iterable[Any]) -> None:
        roots = list(roots)
        self._largest_copy = largest_copy
        self.is_sharded = any(isinstance(root, nn.Module) and is_sharded(root) for root in roots)
        self.found: list[tuple[_Kind, Any]] = []
        self.empty: list[dict[Any, Any]] = []
        """Empty dicts of modules: most of their hooks."""
        self.leaves: dict[int, torch.Tensor] = {}
        """Tensors that gradients may come to, by id."""
        self._reached: dict[Any, Any] = {id(thing): thing for thing in besides}
        self._waiting = roots
        while self._waiting:
            self._reach(self._waiting.pop())

    def _reach(self, thing: Any) -> None:
        look = _look_at(type(thing))
        if look is not None and id(thing) not in self._reached:
            self._reached[id(thing)] = thing  # which keeps its id from being given away
            look(self, thing)

    def _add(self, kind: _Kind, thing: Any, inner: Iterable[Any] = ()) -> None:
        self.found.append((kind, thing))
        self._waiting += inner

    def _module(self, module: nn.Module) -> None:
        entries = vars(module)
        self._add(_LOCAL_ENTRIES if self.is_sharded else _ENTRIES, entries)
        for name, value in entries.items():
            if isinstance(value, dict) and not value:
                self.empty.append(value)
            elif name == PARAMETERS:
                self._add(_LOCAL_ENTRIES if self.is_sharded else _ENTRIES, value)
                parameters = [parameter for parameter in value.values() if parameter is not None]
                self.leaves |= {id(parameter): parameter for parameter in parameters}
                if not self.is_sharded:  # attributes of parameters: 8-bit layers take their scales off them
                    attributes = [vars(parameter) for parameter in parameters if vars(parameter)]
                    self.found += [(_NAMES, _Globals(each, each)) for each in attributes]
                if getattr(module, "max_norm", None) is not None:  # an embedding that scales its rows in forward
                    self.found += [(_CONTENT, parameter) for parameter in parameters]
            elif name == BUFFERS:
                self._add(_ENTRIES, value)
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
        self._add(_CONTENT if can_be_copied else _VERSION, once)

    def _dict(self, entries: dict[Any, Any]) -> None:
        self._add(_ENTRIES, entries, entries.values() if len(entries) <= MANY else ())

    def _list(self, items: list[Any] | deque[Any]) -> None:
        self._add(_ITEMS, items, items if len(items) <= MANY else ())

    def _set(self, items: set[Any]) -> None:
        self._add(_SET, items, items if len(items) <= MANY else ())

    def _fixed(self, items: Iterable[Any]) -> None:
        self._waiting += items

    def _function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        self._waiting += map(_cell_content, cells)
        if _is_library(function.__module__):  # a decorator, say
            return
        self.found += [(_CELL, cell) for cell in cells]
        self._waiting += function.__defaults__ or ()
        if function.__kwdefaults__:
            self._add(_ENTRIES, function.__kwdefaults__, function.__kwdefaults__.values())
        if vars(function):
            self._add(_ENTRIES, vars(function), vars(function).values())
        self._names(function.__globals__, _names_in(function.__code__))

    def _names(self, namespace: dict[str, Any], mentioned: frozenset[str]) -> None:
        names = _Globals(namespace, mentioned)
        for value in names.values():
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not _is_library(value.__name__) and (id(value), mentioned) not in self._reached:
                self._reached[(id(value), mentioned)] = value
                self._names(vars(value), mentioned)
        if names.names:
            self._add(_NAMES, names)

    def _method(self, method: MethodType) -> None:
        self._waiting += (method.__self__, method.__func__)

    def _partial(self, call: partial[Any]) -> None:
        self._add(_ENTRIES, call.keywords, call.keywords.values())
        self._waiting += (call.func, *call.args)

    def _wrapper(self, wrapper: Any) -> None:
        self._waiting += (getattr(wrapper, "__func__", None), getattr(wrapper, "fget", None))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not _is_library(base.__module__):
                values = [value for name, value in vars(base).items() if name != "__dict__"]
                self._add(_ATTRIBUTES, base, values)

    def _object(self, thing: Any) -> None:
        if hasattr(thing, "__dict__"):
            self._add(_ENTRIES, vars(thing), vars(thing).values())
        if slots := _own_attributes(thing):
            self._add(_ATTRIBUTES, thing, slots.values())
        self._waiting.append(type(thing))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor, each once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements surely share memory, as those of `unfold` do: they cannot be written one by one."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > extent


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    """All names of globals and attributes that a function's code mentions, inner functions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


@cache
def _is_library(module: Any) -> bool:
    # Cython's functions have a descriptor in the place of the name.
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


def _slots_of(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _adds(kind: _Kind) -> Callable[[_Search, Any], None]:
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
    ((torch.Generator,), _adds(_TORCH_GENERATOR)),
    ((random.Random,), _adds(_PYTHON_GENERATOR)),
    ((numpy.random.Generator, numpy.random.RandomState), _adds(_NUMPY_GENERATOR)),
    ((numpy.ndarray,), _adds(_ARRAY)),
    ((bytearray, array), _adds(_BYTES)),
    ((GeneratorType, itertools.count, type(iter([])), type(iter(())), type(iter(range(0)))), _adds(_ITERATOR)),
    ((type,), _Search._class),
    ((SimpleNamespace, UserDict, UserList, PretrainedConfig), _Search._object),
]


_looks: WeakKeyDictionary[type, Callable[[_Search, Any], None] | None] = WeakKeyDictionary()


def _look_at(cls: type) -> Callable[[_Search, Any], None] | None:
    """The way to look for state in an object of type `cls`; None if there is none."""
    if cls not in _looks:
        default = None if _is_library(cls.__module__) else _Search._object
        _looks[cls] = next((look for types, look in _BY_TYPE if issubclass(cls, types)), default)
    return _looks[cls]


# Snapshots.


class ModelState:
    """The state within reach of `roots` now: modules, functions, arguments of a call, a Trainer.

    What is only reached by way of `besides` is no part of it.
    """

    def __init__(self, roots: Iterable[Any], largest_copy: int = LARGEST_COPY, besides: Iterable[Any] = ()) -> None:
        search = _Search(roots, largest_copy, besides)
        self.leaves = list(search.leaves.values())
        """Parameters and other tensors that gradients may come to."""
        self._is_sharded = search.is_sharded
        self._empty = search.empty
        self._records = [(kind, thing, kind.take(thing)) for kind, thing in search.found]

    def watch_parameters(self) -> None:
        """Notice changes of parameters in place too."""
        copied = {id(thing) for kind, thing, _ in self._records if kind is _CONTENT}
        watched = [leaf for leaf in self.leaves if id(leaf) not in copied and not leaf.is_inference()]
        self._records += [(_VERSION, leaf, version_of(leaf)) for leaf in watched if not self._is_sharded]

    def changed(self) -> ModelState | None:
        """The part of this state that differs from the present one; None if nothing does.

        Raises UnrestorableError for a change that cannot be put back.
        """
        part = copy.copy(self)
        part._empty = [entries for entries in self._empty if entries]
        part._records = [each for each in self._records if not each[0].same(each[1], each[2])]
        for kind, thing, before in part._records:
            if kind in _ONLY_NOTICED:
                kind.put(thing, before)
        return part if part._empty or part._records else None

    def restore(self, tables: Tables | None = None) -> None:
        """Put this state back, but for `tables`."""
        for kind, thing, before in self._records:
            has_entries = kind in (_ENTRIES, _LOCAL_ENTRIES)
            kept = tables.of(thing, before) if tables is not None and has_entries else {}
            wanted = {**before, **kept} if kept else before
            if kind is _CONTENT or not kind.same(thing, wanted):
                kind.put(thing, wanted)
        for entries in self._empty:
            entries.clear()

    @contextmanager
    def back_for_a_while(self) -> Iterator[None]:
        """While open, this state is in force; afterwards the present one is again."""
        now = copy.copy(self)
        now._records = [(kind, thing, kind.take(thing)) for kind, thing, _ in self._records]
        now._records += [(_ENTRIES, entries, dict(entries)) for entries in self._empty]
        now._empty = []
        self.restore()
        try:
            yield
        finally:
            now.restore()
