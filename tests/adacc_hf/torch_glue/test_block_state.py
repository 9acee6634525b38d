"""State that a block's call changes: restored for a second run, or found to be beyond restoration."""

import collections
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from adacc_hf.torch_glue.block_state import MAX_ITEMS, SMALL_COPY, BlockState, changes_in_place

LARGE = SMALL_COPY  # elements


class Counts(nn.Module):
    """A module whose calls run `change(self, x)`."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.number, self.made, self.text, self.total = 0, None, "", torch.zeros(2)
        self.register_buffer("buffer", torch.zeros(2))
        self.register_buffer("again", torch.zeros(2))
        self.register_buffer("large", torch.zeros(LARGE))
        self.norm = nn.BatchNorm1d(2)
        self.items, self.queue, self.names, self.entries = [0.5], collections.deque([1], maxlen=3), {"a"}, {"n": 0}
        self.nested = {"per": [{"n": torch.zeros(2)}]}
        self.space, self.array = SimpleNamespace(n=0), numpy.zeros(2)
        self.generators = [torch.Generator().manual_seed(2), random.Random(1)]
        self.numpy_generator, self.old_generator = numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.rows = list(range(MAX_ITEMS + 1))

    def forward(self, x):
        self.change(self, x)
        return x


def state(module):
    """Return the state of a `Counts` in a comparable form."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    values |= {f"{name} of norm": value for name, value in vars(module.norm).items() if not name.startswith("_")}
    values |= dict(module.named_buffers())
    return {name: value.tolist() if isinstance(value, torch.Tensor) else repr(value) for name, value in values.items()}


RESTORED = {
    "number": lambda self, x: setattr(self, "number", self.number + 1),
    "None to tensor": lambda self, x: setattr(self, "made", x if self.made is None else self.made + x),
    "new attribute": lambda self, x: setattr(self, "another", len(vars(self))),
    "removed attribute": lambda self, x: vars(self).pop("text", None),
    "attribute of a child": lambda self, x: setattr(self.norm, "momentum", 0.5 * self.norm.momentum),
    "flag": lambda self, x: self.train(not self.training),
    "new list": lambda self, x: setattr(self, "items", [*self.items, 1]),
    "tensor": lambda self, x: self.total.add_(x),
    "data of a tensor": lambda self, x: setattr(self.total, "data", torch.cat([self.total, x])),
    "buffer": lambda self, x: self.buffer.add_(x),
    "data of a buffer": lambda self, x: self.buffer.data.add_(x),
    "new buffer": lambda self, x: setattr(self, "again", self.again + x),
    "large buffer": lambda self, x: self.large.add_(1),
    "norm": lambda self, x: self.norm(torch.rand(3, 2)),
}
LOST = {
    "items": lambda self, x: self.items.append(x.sum()),
    "items again": lambda self, x: self.items.__setitem__(0, self.items[0] + 0.25),
    "queue": lambda self, x: self.queue.append(2),
    "names": lambda self, x: self.names.add("b"),
    "entries": lambda self, x: self.entries.update(n=self.entries["n"] + 1),
    "nested": lambda self, x: self.nested["per"][0]["n"].add_(x),
    "space": lambda self, x: setattr(self.space, "n", self.space.n + 1),
    "array": lambda self, x: self.array.__iadd__(1),
    "generators": lambda self, x: torch.rand(1, generator=self.generators[0]),
    "generators again": lambda self, x: self.generators[1].random(),
    "numpy_generator": lambda self, x: self.numpy_generator.random(),
    "old_generator": lambda self, x: self.old_generator.rand(),
    "rows": lambda self, x: self.rows.append(1),
}


@pytest.mark.parametrize("kind", RESTORED)
def test_state_is_restored_for_a_while(kind):
    module, x = Counts(RESTORED[kind]), torch.ones(2)
    for _ in range(2):
        before, snapshot = state(module), BlockState(module, (x,))
        module(x)
        after = state(module)
        assert after != before
        assert snapshot.find_changes() is None
        with snapshot.temporarily_restored():
            assert state(module) == before
            module(x)
        assert state(module) == after
        if kind == "removed attribute":
            module.text = ""
    assert not changes_in_place(module)


@pytest.mark.parametrize("kind", LOST)
def test_a_change_that_cannot_be_restored_is_found(kind):
    module, x = Counts(LOST[kind]), torch.ones(2)
    snapshot = BlockState(module, (x,))
    assert snapshot.find_changes() is None
    assert not changes_in_place(module)
    snapshot = BlockState(module, (x,))
    module(x)
    assert snapshot.find_changes() == kind.removesuffix(" again")
    assert changes_in_place(module)


def test_an_iterator_counts_as_changed():
    module = Counts(lambda self, x: None)
    module.numbers = iter([1.0, 2.0])
    assert BlockState(module, ()).find_changes() == "numbers"


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda argument: argument.append(1)),
        (lambda: {"aux": [torch.ones(1)]}, lambda argument: argument["aux"].append(1)),
        (lambda: SimpleNamespace(losses={}), lambda argument: argument.losses.update(a=1)),
        (lambda: torch.ones(2), lambda argument: argument.add_(1)),
    ],
)
def test_a_changed_argument_is_found(make, change):
    argument = make()
    snapshot = BlockState(nn.Identity(), ((torch.ones(1),), {"sink": argument}))
    change(argument)
    assert snapshot.find_changes() == "an argument"


def test_a_block_that_changes_nothing_keeps_no_large_copies_until_its_mode_changes():
    module = Counts(lambda self, x: None)
    for _ in range(2):
        snapshot = BlockState(module, ())
        assert snapshot.find_changes() is None
    for is_training in (False, True):  # the first state of each mode has copies
        module.train(is_training)
        snapshot = BlockState(module, ())
        module.large.add_(1)
        assert snapshot.find_changes() is None
        assert snapshot.written
        for _ in range(2):
            assert BlockState(module, ()).find_changes() is None
    snapshot = BlockState(module, ())
    module.large.add_(1)
    assert snapshot.find_changes() == "large"


def test_a_tensor_with_shared_elements_is_only_compared():
    module = nn.Identity()
    module.register_buffer("view", torch.zeros(6).unfold(0, 3, 1))
    snapshot = BlockState(module, ())
    module.view[0].add_(1)
    assert snapshot.find_changes() == "view"
