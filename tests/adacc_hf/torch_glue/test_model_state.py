"""State that a model's Python code changes: found wherever it is stored, restored, and changed once per call."""

import array
import collections
import dataclasses
import gc
import importlib
import itertools
import random
import sys
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.model_state import ModelState
from adacc_hf.torch_glue.no_trace import UNCHANGED_CALLS, NoTrace, record_state_changes
from adacc_hf.torch_glue.rng_state import RandomStates

CONFIG = AdaccConfig(min_compress_bytes=0)

SEEN = []
NUM_CALLS = 0
TABLE = {"sum": torch.zeros(2)}


def restore_globals():
    global NUM_CALLS
    NUM_CALLS = 0
    SEEN.clear()
    TABLE["sum"] = torch.zeros(2)


@dataclasses.dataclass
class Meter:
    count: int = 0
    history: list = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Counts(nn.Module):
    """A module that changes the state named by `kind` in each call; `state` reads it."""

    shared = collections.Counter()  # noqa: RUF012
    total = 0

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(2))
        self.number, self.made, self.text, self.flag = 0, None, "", False
        self.items, self.queue, self.names, self.entries = [0], collections.deque([1], maxlen=3), {"a"}, {"n": 0}
        self.nested = {"per": [{"n": torch.zeros(2)}]}
        self.tensor, self.grown = torch.zeros(2), torch.zeros(2)
        self.register_buffer("buffer", torch.zeros(2))
        self.register_buffer("again", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)
        self.meter, self.slots, self.space = Meter(), Slots(), SimpleNamespace(n=0)
        self.user_dict = collections.UserDict(n=0)
        self.array, self.bytes, self.machine_array = numpy.zeros(2), bytearray(b"00"), array.array("d", [0.0])
        self.torch_generator = torch.Generator().manual_seed(1)
        self.generators = [torch.Generator().manual_seed(2)]
        self.python_generator, self.numpy_generator = random.Random(1), numpy.random.default_rng(1)
        self.old_numpy_generator = numpy.random.RandomState(1)
        self.counter = counter()
        self.children_of_mine = (nn.BatchNorm1d(2),)

    def forward(self, x):
        return CHANGES[self.kind](self, x) or x * self.weight


def counter():
    sums = []
    num = 0

    def count(x=None, log=[]):  # noqa: B006
        nonlocal num
        if x is not None:
            num += 1
            sums.append(float(x.detach().sum()))
            log.append(num)
        return num, list(sums), list(log)

    return count


def set_global(self, x):
    global NUM_CALLS
    NUM_CALLS += 1


def change_class(self, x):
    type(self).total += 1
    self.shared["n"] += 1


def add_hook(self, x):
    self.norm.register_forward_hook(lambda *_: None)


CHANGES = {
    "number": lambda self, x: setattr(self, "number", self.number + 1),
    "None to tensor": lambda self, x: setattr(self, "made", x.detach() if self.made is None else self.made + x),
    "new attribute": lambda self, x: setattr(self, "another", len(vars(self))),
    "removed attribute": lambda self, x: vars(self).pop("text", None) and None,
    "list": lambda self, x: self.items.append(x.sum()),
    "list item": lambda self, x: self.items.__setitem__(0, self.items[0] + 1),
    "deque": lambda self, x: self.queue.append(2),
    "set": lambda self, x: self.names.add("b"),
    "dict": lambda self, x: self.entries.update(n=self.entries["n"] + 1, more=1),
    "nested tensor": lambda self, x: (self.nested["per"][0]["n"].add_(x.detach().sum()), None)[1],
    "tensor": lambda self, x: (self.tensor.add_(1), None)[1],
    "grown tensor": lambda self, x: setattr(self, "grown", torch.zeros(len(self.grown) + 1)),
    "data of a tensor": lambda self, x: setattr(self.tensor, "data", torch.ones(3)),
    "buffer": lambda self, x: (self.buffer.add_(1), None)[1],
    "buffer anew": lambda self, x: self.register_buffer("again", self.again + 1),
    "BatchNorm": lambda self, x: (self.norm(x.detach().expand(3, 2) + torch.arange(3.0)[:, None]), None)[1],
    "module in a tuple": lambda self, x: (self.children_of_mine[0](torch.rand(3, 2)), None)[1],
    "dataclass": lambda self, x: (setattr(self.meter, "count", self.meter.count + 1), self.meter.history.append(1))[1],
    "slots": lambda self, x: setattr(self.slots, "count", self.slots.count + 1),
    "namespace": lambda self, x: setattr(self.space, "n", self.space.n + 1),
    "UserDict": lambda self, x: self.user_dict.update(n=1),
    "numpy array": lambda self, x: self.array.__setitem__(0, self.array[0] + 1),
    "bytearray": lambda self, x: self.bytes.extend(b"1"),
    "array": lambda self, x: self.machine_array.append(1.0),
    "torch.Generator": lambda self, x: (torch.rand(1, generator=self.torch_generator), None)[1],
    "generator in a list": lambda self, x: (torch.rand(1, generator=self.generators[0]), None)[1],
    "random.Random": lambda self, x: (self.python_generator.random(), None)[1],
    "numpy generator": lambda self, x: (self.numpy_generator.random(), None)[1],
    "old numpy generator": lambda self, x: (self.old_numpy_generator.rand(), None)[1],
    "closure": lambda self, x: (self.counter(x), None)[1],
    "global list": lambda self, x: SEEN.append(x.sum()),
    "global number": set_global,
    "global dict": lambda self, x: TABLE.update(sum=TABLE["sum"] + x.detach()),
    "class": change_class,
    "hook": add_hook,
    "flag": lambda self, x: self.train(not self.training) and None,
}


def state(module):
    """Return all state that a `Counts` may change, in a comparable form."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return ("tensor", tuple(value.shape), value.detach().flatten().tolist())
        if isinstance(value, nn.Module):
            return {name: plain(each) for name, each in vars(value).items() if "hook" not in name} | {
                "num_hooks": len(value._forward_hooks)
            }
        if isinstance(value, (dict, collections.UserDict)):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple, collections.deque)):
            return [plain(each) for each in value]
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, numpy.random.Generator):
            return str(value.bit_generator.state)
        if isinstance(value, numpy.random.RandomState):
            return str(value.get_state(legacy=False)["state"]["pos"])
        if isinstance(value, Slots):
            return value.count
        return value() if callable(value) and not isinstance(value, type) else repr(value)

    return plain(module), plain([SEEN, NUM_CALLS, TABLE, Counts.total, Counts.shared])


@pytest.fixture(autouse=True)
def _globals_as_before():
    yield
    restore_globals()
    Counts.total = 0
    Counts.shared.clear()


@pytest.mark.parametrize("kind", CHANGES)
def test_all_state_is_put_back(kind):
    module, x = Counts(kind), torch.ones(2, requires_grad=True)
    module(x)
    before, snapshot = state(module), ModelState([module])
    module(x)
    is_done_once = kind in ("removed attribute", "UserDict", "set", "data of a tensor")
    assert (state(module) == before) is is_done_once
    module(x)
    snapshot.restore()
    assert state(module) == before
    module(x)
    with snapshot.temporarily_restored():
        assert state(module) == before
        module(x)
    snapshot.restore()
    assert state(module) == before


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_noticed_and_put_back_for_a_while(kind):
    module, x = Counts(kind), torch.ones(2, requires_grad=True)
    before = state(module)
    with record_state_changes(module) as changed:
        module(x)
    after = state(module)
    assert bool(changed) is (after != before)
    for part in changed:
        with part.temporarily_restored():
            assert state(module) == before
            module(x)
        assert state(module) == after


@pytest.mark.parametrize(
    "value",
    [itertools.count(), iter([1, 2, 3]), iter(range(9)), (n for n in range(9)), (n for _ in (0,) for n in "ab")],
)
def test_an_iterator_that_advances_is_refused(value):
    module = nn.Identity()
    module.iterator = value
    next(value)
    snapshot = ModelState([module])
    assert snapshot.changed() is None
    next(value)
    with pytest.raises(UnrestorableError, match="which cannot be undone"):
        snapshot.changed()
    with pytest.raises(UnrestorableError, match="which cannot be undone"):
        snapshot.restore()


LOCKS = """
import itertools
from torch import nn
numbers = itertools.count()
seen = []
class Lock:
    taken = 0
    def take(self):
        Lock.taken += 1
        seen.append(next(numbers))
class Block(nn.Module):
    def forward(self, x):
        Lock().take()
        return x
"""


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """An installed package whose code changes its own globals and class attributes."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "adacc_test_locks.py").write_text(LOCKS)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("adacc_test_locks")
    del sys.modules["adacc_test_locks"]


def test_code_of_an_installed_package_may_change_its_own_state(locks):
    """A metric of the Trainer may reach, for example, a package that counts the locks of the process."""
    module = nn.Identity()
    module.metric, module.lock = (lambda: locks.Lock().take()), locks.Lock()
    snapshot = ModelState([module])
    module.metric()
    module.lock.holder = "added"
    snapshot.restore()
    assert locks.seen == [0]
    assert not vars(module.lock), "objects are restored, whatever package their class belongs to"


def test_the_arguments_of_a_forward_are_freed_with_the_snapshot(locks):
    """Waiting for garbage collection would keep a part of the batch alive."""
    module, batch = nn.Identity(), {"input_ids": torch.ones(2, 3)}
    module.lock = locks.Lock.take  # the search of this package is postponed
    argument = weakref.ref(batch["input_ids"])
    gc.collect()
    gc.disable()
    try:
        snapshot = ModelState([module, batch])
        del snapshot, batch
        assert argument() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("order", [1, -1])
def test_state_of_an_installed_package_is_restored_if_a_module_belongs_to_the_package(locks, order):
    module, metric = locks.Block(), (lambda: locks.Lock().take())
    snapshot = ModelState([metric, nn.Sequential(nn.Identity(), module)][::order])
    assert snapshot.changed() is None
    module(torch.ones(1))
    with pytest.raises(UnrestorableError, match="which cannot be undone"):
        snapshot.restore()
    locks.numbers = None  # an iterator cannot be restored, all other state can
    snapshot = ModelState([metric, nn.Sequential(nn.Identity(), module)][::order])
    before = list(locks.seen), locks.Lock.taken
    locks.seen.append(1)
    locks.Lock.taken += 1
    snapshot.restore()
    assert (locks.seen, locks.Lock.taken) == before


def test_a_large_tensor_that_changes_is_refused():
    module = nn.Identity()
    module.large = torch.zeros(1000)
    snapshot = ModelState([module], largest_copy=100)
    assert snapshot.changed() is None
    module.large.add_(1)
    with pytest.raises(UnrestorableError, match=r"size \(1000,\)"):
        snapshot.restore()


@pytest.mark.parametrize("kind", ["expanded", "expanded twice", "unfolded", "transposed", "empty", "scalar", "a part"])
def test_tensors_that_lie_in_any_way_are_put_back(kind):
    module, base = nn.Identity(), torch.arange(6.0)
    module.view = {
        "expanded": lambda: base[:, None].expand(6, 4),
        "expanded twice": lambda: base[None, :2, None].expand(3, 2, 4),
        "unfolded": lambda: base.unfold(0, 3, 1),
        "transposed": lambda: base.view(2, 3).t(),
        "empty": lambda: base[:0],
        "scalar": lambda: base[3],
        "a part": lambda: base[1:5:2],
    }[kind]()
    before, snapshot = module.view.clone(), ModelState([module])
    assert snapshot.changed() is None
    snapshot.restore()
    with torch.no_grad():
        base.add_(1)
    if kind == "unfolded":
        with pytest.raises(UnrestorableError, match="there is no copy to restore it from"):
            snapshot.restore()
    else:
        snapshot.restore()
        assert torch.equal(module.view, before)


def test_the_items_of_a_data_set_are_not_searched():
    module = nn.Identity()
    module.rows = [{"n": 0} for _ in range(10_000)]
    assert len(ModelState([module]).records) < 20
    module.rows.append(1)
    snapshot = ModelState([module])
    module.rows.append(2)
    snapshot.restore()
    assert module.rows[-1] == 1


def make_tables(module):
    if module.table is None:
        module.table, module.pair = torch.ones(3), (torch.ones(1), torch.ones(1))
    module.grown = module.grown if len(module.grown) == 4 else torch.zeros(4)
    module.size = 4
    module.seen.append(torch.ones(1))
    module.total = torch.ones(1) if module.total is None else module.total + 1


def test_tables_that_are_made_once_stay():
    """Tables that are created once stay after a profile. Else the profile would record operators that training runs
    once."""
    module = nn.Identity()
    module.table, module.pair, module.grown, module.size, module.seen = None, None, torch.zeros(2), 2, []
    module.total = None
    names = []
    with NoTrace([module], lambda: RandomStates([])) as context:
        for _ in range(3):
            make_tables(module)
            table, pair, grown = module.table, module.pair, module.grown
            names.append(context.start_over())
            assert (module.size, module.seen) == (2, [])
        make_tables(module)
        module.late = torch.ones(1)
    assert [len(names_of_state) for names_of_state in names] == [4, 4, 4]
    assert module.table is table
    assert module.pair is pair
    assert module.grown is grown
    assert module.total is None
    assert (module.size, module.seen) == (2, [])
    assert not hasattr(module, "late")


def test_a_block_that_changes_nothing_keeps_no_copies():
    block, x = nn.Identity(), torch.ones(2)
    block.register_buffer("large", torch.zeros(1 << 16))
    for _ in range(UNCHANGED_CALLS):
        with record_state_changes(block) as changed:
            block(x)
        assert not changed
    with pytest.raises(UnrestorableError, match="there is no copy to restore it from"), record_state_changes(block):
        block.large.add_(1)


def test_a_block_whose_mode_changes_is_looked_at_again():
    block = nn.BatchNorm1d(1 << 15).eval()
    for _ in range(UNCHANGED_CALLS + 1):
        with record_state_changes(block) as changed:
            block(torch.randn(2, 1 << 15))
        assert not changed
    block.train()
    with record_state_changes(block) as changed:
        block(torch.randn(2, 1 << 15))
    assert changed


def run_in_no_trace(module, run):
    """Run `run` in a `no_trace` context and return the states (before, after)."""

    def everything():
        gradients = [None if p.grad is None else p.grad.tolist() for p in module.parameters()]
        wants = [p.requires_grad for p in module.parameters()]
        return gradients, wants, torch.rand(1).item(), [p.tolist() for p in module.parameters()]

    torch.manual_seed(3)
    before = everything()
    torch.manual_seed(3)
    with NoTrace([module], lambda: RandomStates([])) as context:
        run(context)
    return before, everything()


def own_backward(module, _):
    module.weight.grad = torch.ones(2)
    (module.weight.sum() * torch.rand(1)).backward()


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        own_backward,
        lambda module, _: (module.weight.sum() * 3).backward(),
        lambda module, _: module.requires_grad_(False),
        lambda module, context: (torch.rand(9), context.start_over()),
        lambda module, context: (random.random(), context.continue_random_states(), numpy.random.rand()),
    ],
)
def test_gradients_flags_and_generators_are_put_back(run, has_gradient):
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.weight.grad = torch.full((2,), 5.0) if has_gradient else None
    gradient = module.weight.grad
    before, after = run_in_no_trace(module, lambda context: run(module, context))
    assert before == after
    assert module.weight.grad is gradient


def test_a_parameter_that_forward_changes_is_refused():
    module = nn.Linear(2, 2)
    with pytest.raises(UnrestorableError, match="parameters outside of forward"):
        run_in_no_trace(module, lambda _: module.weight.detach().clamp_(-0.01, 0.01))


def test_an_error_is_not_replaced_by_what_cannot_be_put_back():
    module = nn.Identity()
    module.iterator = itertools.count()

    def fail():
        next(module.iterator)
        raise KeyError("planned")

    with pytest.raises(KeyError, match="planned"), NoTrace([module], lambda: RandomStates([])):
        fail()


def test_gradients_below_an_output_are_put_back():
    outside, module = nn.Linear(2, 2), nn.Identity()
    hidden = outside(torch.ones(1, 2))
    with NoTrace([module], lambda: RandomStates([])) as context:
        loss = hidden.sum()
        context.protect_gradients_of([loss])
        loss.backward()
        assert outside.weight.grad is not None
    assert outside.weight.grad is None


# In training.


def give_state(block):
    block.register_buffer("count", torch.zeros(()))
    block.norm = nn.BatchNorm1d(6)
    block.mean = torch.zeros(8)
    block.num_calls = 0
    block.generator = torch.Generator().manual_seed(3)
    block.load, block.losses = None, []


def changes_all(block, hidden):
    x = block.norm(block.up(hidden)) + block.mean
    x = x * (1.0 + 0.1 * block.num_calls + 0.1 * block.count.clone())
    x = x * (torch.rand(x.shape, generator=block.generator) > 0.2)
    block.num_calls += 1
    block.losses.append(x.detach().sum())
    with torch.no_grad():
        block.count += 1
        block.mean.lerp_(x.mean((0, 1)), 0.1)
        block.load = x.sum() if block.load is None else block.load + x.sum()
    return hidden + block.down(x.tanh())


def changes_all_and_reads(block, hidden):
    """Change all state and read data, so that torch's checkpoint runs the block."""
    return changes_all(block, hidden) * (1.0 if hidden.sum().item() > 0 else 0.5)


@pytest.mark.parametrize("forward", [changes_all, changes_all_and_reads])
def test_state_changes_once_per_call(toy_model, toy_batch, run_steps, assert_same_steps, forward):
    batch = toy_batch()
    plain_model, model = (toy_model(forward, setup=give_state) for _ in range(2))
    plain = run_steps(plain_model, batch)
    profile = profile_model(model, batch, CONFIG)
    assert all(block.load is None and not block.losses for block in model.layers)
    assert all(kind.untrusted is not None for kind in profile.kinds)  # Dynamo stops at the generator
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch), plain)
    for ours, theirs in zip(model.layers, plain_model.layers, strict=True):
        assert ours.num_calls == theirs.num_calls == 3
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.load, theirs.load)
        assert ours.losses == theirs.losses
        assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())
