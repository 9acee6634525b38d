"""Kinds of state: each one is copied, compared and put back, or its change is refused."""

import itertools
import random
import weakref
from array import array
from collections import Counter, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.torch_glue import state_kinds as kinds


class Slots:
    __slots__ = ("count", "later")

    def __init__(self):
        self.count = 1


class Derived(Slots):
    __slots__ = "own"


class Totals:
    total = 0

    def method(self):
        """A method is no state."""


def cell_of(value):
    def read():
        return value

    (cell,) = read.__closure__
    return cell


def swap(items, index, value):
    items[index] = value


# (kind, a new object, a change of the object, what of the object can be compared)
RESTORABLE = {
    "dict": (kinds.ENTRIES, lambda: {"a": 1, "b": 2}, lambda x: x.update(c=3), lambda x: list(x.items())),
    "order of a dict": (kinds.ENTRIES, lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a")), lambda x: list(x)),
    "Counter": (kinds.ENTRIES, lambda: Counter("aab"), lambda x: x.update("ab"), dict),
    "list": (kinds.ITEMS, lambda: [1, 2], lambda x: swap(x, 0, 3), list),
    "deque": (kinds.ITEMS, lambda: deque([1, 2], maxlen=2), lambda x: x.append(3), list),
    "set": (kinds.SET, lambda: {1}, lambda x: x.add(2), set),
    "cell": (kinds.CELL, lambda: cell_of("a"), lambda x: setattr(x, "cell_contents", "b"), kinds.cell_content),
    "slots": (kinds.ATTRIBUTES, Slots, lambda x: setattr(x, "count", 2), lambda x: x.count),
    "a slot that was empty": (
        kinds.ATTRIBUTES,
        Slots,
        lambda x: setattr(x, "later", 2),
        lambda x: hasattr(x, "later"),
    ),
    "a slot of a base": (kinds.ATTRIBUTES, Derived, lambda x: setattr(x, "count", 2), lambda x: x.count),
    "class": (
        kinds.ATTRIBUTES,
        lambda: type("Mine", (Totals,), {"total": 0}),
        lambda x: setattr(x, "total", 1),
        lambda x: x.total,
    ),
    "globals": (
        kinds.NAMES,
        lambda: kinds.Globals({"NUM": 1, "other": 2}, ["NUM", "absent"]),
        lambda x: x.namespace.update(NUM=2),
        lambda x: x.namespace["NUM"],
    ),
    "tensor": (kinds.CONTENT, lambda: torch.zeros(3), lambda x: x.add_(1), torch.Tensor.tolist),
    "resized tensor": (
        kinds.CONTENT,
        lambda: torch.zeros(3),
        lambda x: setattr(x, "data", torch.ones(2)),
        torch.Tensor.tolist,
    ),
    "numpy array": (kinds.ARRAY, lambda: numpy.zeros(3), lambda x: swap(x, 0, 1), numpy.ndarray.tolist),
    "bytearray": (kinds.BYTES, lambda: bytearray(b"ab"), lambda x: x.extend(b"c"), bytes),
    "array": (kinds.BYTES, lambda: array("d", [1.0]), lambda x: x.append(2.0), array.tolist),
    "torch.Generator": (
        kinds.TORCH_GENERATOR,
        lambda: torch.Generator().manual_seed(1),
        lambda x: torch.rand(1, generator=x),
        lambda x: x.get_state().tolist(),
    ),
    "random.Random": (kinds.PYTHON_GENERATOR, lambda: random.Random(1), lambda x: x.random(), lambda x: x.getstate()),
    "numpy generator": (
        kinds.NUMPY_GENERATOR,
        lambda: numpy.random.default_rng(1),
        lambda x: x.random(),
        lambda x: str(x.bit_generator.state),
    ),
    "old numpy generator": (
        kinds.NUMPY_GENERATOR,
        lambda: numpy.random.RandomState(1),
        lambda x: x.rand(),
        lambda x: x.get_state(legacy=False)["state"]["pos"],
    ),
}


@pytest.mark.parametrize("name", RESTORABLE)
def test_a_change_is_seen_and_put_back(name):
    kind, make, change, seen = RESTORABLE[name]
    state = make()
    before, copy = seen(state), kind.take(state)
    assert kind.same(state, copy)
    kind.put(state, copy)
    assert seen(state) == before, "what did not change stays"
    change(state)
    assert not kind.same(state, copy)
    kind.put(state, copy)
    assert seen(state) == before
    assert kind.same(state, copy)


def test_values_are_compared_by_identity():
    """Equal values may be other tensors. A model that holds one of them must get the same one back."""
    first, second = torch.zeros(2), torch.zeros(2)
    items = [first]
    copy = kinds.ITEMS.take(items)
    items[0] = second
    assert not kinds.ITEMS.same(items, copy)
    kinds.ITEMS.put(items, copy)
    assert items[0] is first


def test_an_empty_cell_is_empty_again():
    cell = cell_of("a")
    del cell.cell_contents
    copy = kinds.CELL.take(cell)
    cell.cell_contents = "b"
    assert not kinds.CELL.same(cell, copy)
    kinds.CELL.put(cell, copy)
    with pytest.raises(ValueError, match="empty"):
        _ = cell.cell_contents


def test_methods_are_no_attributes():
    assert kinds.own_attributes(Totals) == {"total": 0}
    assert kinds.own_attributes(Slots()) == {"count": 1}


def test_parameters_that_sharding_sets_are_left_alone():
    parameter = nn.Parameter(torch.ones(1))
    entries = {"weight": parameter, "count": 1}
    copy = kinds.LOCAL_ENTRIES.take(entries)
    assert copy == {"count": 1}
    entries["weight"] = nn.Parameter(torch.zeros(1))
    assert kinds.LOCAL_ENTRIES.same(entries, copy)
    replaced = entries["weight"]
    entries.update(count=2, more=3)
    assert not kinds.LOCAL_ENTRIES.same(entries, copy)
    kinds.LOCAL_ENTRIES.put(entries, copy)
    assert entries == {"weight": replaced, "count": 1}


@pytest.mark.parametrize(
    ("tensor", "advice"),
    [(nn.Parameter(torch.zeros(4)), "change parameters outside of forward"), (torch.zeros(4), "make it a buffer")],
)
def test_a_change_without_a_copy_is_refused_with_advice(tensor, advice):
    copy = kinds.VERSION.take(tensor)
    assert kinds.VERSION.same(tensor, copy)
    with torch.no_grad():
        tensor.add_(1)
    assert not kinds.VERSION.same(tensor, copy)
    with pytest.raises(UnrestorableError, match=rf"size \(4,\) in place, .*{advice}"):
        kinds.VERSION.put(tensor, copy)


@pytest.mark.parametrize(
    "make",
    [
        itertools.count,
        lambda: iter([1, 2, 3]),
        lambda: iter(range(9)),
        lambda: (n for n in range(9)),
        lambda: iter("abc"),
    ],
    ids=["count", "list", "range", "generator", "text"],
)
def test_an_iterator_that_advances_is_refused(make):
    iterator = make()
    next(iterator)
    copy = kinds.ITERATOR.take(iterator)
    assert kinds.ITERATOR.same(iterator, copy)
    next(iterator)
    assert not kinds.ITERATOR.same(iterator, copy)
    with pytest.raises(UnrestorableError, match="which cannot be undone"):
        kinds.ITERATOR.put(iterator, copy)


def test_the_variables_of_a_generator_are_not_kept_alive():
    """A training loop's data loader is a generator, whose variables are batches."""

    def loader():
        for length in (3, 4, 5):
            tensor = torch.ones(length)
            batches.append(weakref.ref(tensor))
            yield length

    batches: list[weakref.ref] = []
    iterator = loader()
    next(iterator)
    copy = kinds.ITERATOR.take(iterator)
    assert kinds.ITERATOR.same(iterator, copy)
    next(iterator)
    assert batches[0]() is None
    assert not kinds.ITERATOR.same(iterator, copy)


def test_kinds_that_cannot_be_put_back_are_listed():
    assert set(kinds.UNRESTORABLE) == {kinds.VERSION, kinds.ITERATOR}


def test_hooks_that_collect_hidden_states_are_recognized():
    hook = SimpleNamespace(__module__=kinds.CAPTURING)
    assert kinds.is_capturing("any name", hook)
    assert kinds.is_capturing(kinds.CAPTURES, True)
    assert not kinds.is_capturing("any name", SimpleNamespace(__module__="mine"))
    assert not kinds.is_capturing("any name", 3)
