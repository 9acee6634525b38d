"""Kinds of state that a model's Python code may change, each with functions to copy, compare and restore the state."""

from __future__ import annotations

import gc
import itertools
import operator
import pickle
import random
from collections.abc import Callable, Iterable
from operator import is_, length_hint
from types import CellType, GeneratorType
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.torch_glue.private import version_of

_ABSENT: Any = object()


class Kind(NamedTuple):
    """Functions that copy, compare and restore one kind of state of an object.

    `take` copies the state. `same` compares the object with the copy, and `put` restores the object from the copy.
    """

    take: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any], None]


def _has_same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _has_same_entries(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return _has_same_items(now.values(), before.values()) and list(now) == list(before)


def _put_entries(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(now) != list(before):
        now.clear()
    for name, value in before.items():  # the `update` of a Counter adds
        now[name] = value


def _put_items(now: Any, before: Any) -> None:
    now.clear()
    (now.update if isinstance(now, set) else now.extend)(before)


def cell_content(cell: CellType) -> Any:
    """Return the content of a closure's cell, or a marker if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _put_cell(cell: CellType, before: Any) -> None:
    if before is not _ABSENT:
        cell.cell_contents = before
    elif cell_content(cell) is not _ABSENT:
        del cell.cell_contents


def own_attributes(owner: Any) -> dict[str, Any]:
    """Return a class's data attributes, without inherited ones. For an object that is not a class, return the values of
    its `__slots__`."""
    if isinstance(owner, type):
        attributes = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        return {name: value for name, value in attributes.items() if not hasattr(value, "__get__")}
    names = [name for cls in type(owner).__mro__ for name in _slots_of(cls)]
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _slots_of(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _put_attributes(owner: Any, before: dict[str, Any]) -> None:
    now = own_attributes(owner)
    for name in now.keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if now.get(name, _ABSENT) is not value:
            setattr(owner, name, value)


class Globals:
    """Global variables that a function's code uses.

    `namespace` is the dict of a module's globals. `names` are the names in the code.
    """

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        self.namespace = namespace
        self.names = [name for name in names if name in namespace]

    def values(self) -> list[Any]:
        return [self.namespace.get(name, _ABSENT) for name in self.names]

    def put(self, before: list[Any]) -> None:
        self.namespace.update(zip(self.names, before, strict=True))


def _put_content(tensor: torch.Tensor, before: torch.Tensor) -> None:
    # `.data` hides the change from autograd, which is safe: no backward of an earlier forward follows.
    if tensor.shape == before.shape:
        tensor.data.copy_(before)
    else:
        tensor.data = before.clone()


def _refuse_change(tensor: torch.Tensor, before: int) -> None:
    """Raise UnrestorableError for a tensor that was changed in place and of which there is no copy."""
    if isinstance(tensor, nn.Parameter):
        advice = "change parameters outside of forward, in the training step"
    else:
        advice = "write into a copy if it is an argument, and make it a buffer (register_buffer) if a module holds it"
    raise UnrestorableError(
        f"forward changes a tensor of size {tuple(tensor.shape)} in place, and there is no copy to restore it from: "
        f"{advice}, or train without adacc_hf"
    )


def _iterator_position(iterator: Any) -> Any:
    """Return a value that changes when the iterator advances, if Python code can observe this. Some iterators advance
    without an observable change."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if not isinstance(iterator, GeneratorType):
        return length_hint(iterator)
    frame, inner = iterator.gi_frame, iterator.gi_yieldfrom
    if frame is None:
        return None
    # `frame.f_locals` would copy the local variables into a dict that keeps them alive as long as the generator lives.
    return frame.f_lasti, list(map(id, gc.get_referents(iterator))), length_hint(inner, -1)


def _refuse_iterator_advance(iterator: Any, before: Any) -> None:
    """Raise UnrestorableError, because an iterator that the model has advanced cannot be restored."""
    raise UnrestorableError(
        f"forward advances {iterator!r:.80}, which cannot be undone: use a number, or a list with an index, instead of "
        f"this iterator, or train without adacc_hf"
    )


def _numpy_state(generator: Any) -> bytes:
    is_new = isinstance(generator, numpy.random.Generator)
    return pickle.dumps(generator.bit_generator.state if is_new else generator.get_state(legacy=False))


def _put_numpy_state(generator: Any, before: bytes) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = pickle.loads(before)
    else:
        generator.set_state(pickle.loads(before))


def _local_entries(entries: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a sharded module's `__dict__`, or of a dict in it, without parameters and views of
    parameters. FSDP sets and removes parameters and views of parameters around each forward."""
    return {
        name: value
        for name, value in entries.items()
        if not (isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)))
    }


def _put_local_entries(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore the entries of a sharded module's dict `now` from `before`, except for parameters and views of
    parameters."""
    for name in _local_entries(now).keys() - before.keys():
        del now[name]
    now.update(before)


ENTRIES = Kind(dict, _has_same_entries, _put_entries)
LOCAL_ENTRIES = Kind(
    _local_entries, lambda now, before: _has_same_entries(_local_entries(now), before), _put_local_entries
)
"""Kind of state for the attribute dicts of modules with sharded parameters. Parameters are left out."""
ITEMS = Kind(list, _has_same_items, _put_items)
SET = Kind(set, lambda now, before: now == before, _put_items)
CELL = Kind(cell_content, lambda cell, before: cell_content(cell) is before, _put_cell)
ATTRIBUTES = Kind(
    own_attributes, lambda owner, before: _has_same_entries(own_attributes(owner), before), _put_attributes
)
NAMES = Kind(Globals.values, lambda names, before: _has_same_items(names.values(), before), Globals.put)
CONTENT = Kind(lambda tensor: tensor.detach().clone(), torch.equal, _put_content)
VERSION = Kind(version_of, lambda tensor, before: version_of(tensor) == before, _refuse_change)
ARRAY = Kind(
    numpy.array, lambda now, before: now.tobytes() == before.tobytes(), lambda now, before: numpy.copyto(now, before)
)
BYTES = Kind(lambda now: now[:], operator.eq, lambda now, before: operator.setitem(now, slice(None), before))
TORCH_GENERATOR = Kind(
    torch.Generator.clone_state,  # not get_state(), whose tensor would count as live memory
    lambda now, before: torch.equal(now.get_state(), before.get_state()),
    lambda now, before: now.set_state(before.get_state()),
)
PYTHON_GENERATOR = Kind(
    random.Random.getstate, lambda now, before: now.getstate() == before, lambda now, before: now.setstate(before)
)
NUMPY_GENERATOR = Kind(_numpy_state, lambda now, before: _numpy_state(now) == before, _put_numpy_state)
ITERATOR = Kind(_iterator_position, lambda now, before: _iterator_position(now) == before, _refuse_iterator_advance)
UNRESTORABLE = (VERSION, ITERATOR)
"""Kinds of state whose changes are detected but cannot be undone. `put` of these kinds raises UnrestorableError."""


CAPTURING = "transformers.utils.output_capturing"
"""Name of Transformers' Python module that defines hooks to collect hidden states.

A model that returns hidden states (LLaVA's vision tower) registers these hooks permanently at its first forward.
Restoring state does not remove them, because otherwise each forward would register new hooks, and need new guards.
"""
CAPTURES = "_output_capturing_hooks_installed"
"""Name of an attribute that Transformers sets on a model that has registered the hooks of `CAPTURING`."""


def is_capturing(name: Any, value: Any) -> bool:
    """Return True if the entry (`name`, `value`) of a module's state comes from Transformers' hooks that collect hidden
    states."""
    return name == CAPTURES or getattr(value, "__module__", None) == CAPTURING
