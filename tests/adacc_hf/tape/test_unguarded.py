"""Changes between steps that Dynamo's guards do not cover: identities, paths to a weight, classes, the environment."""

import os
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


class Mark:
    """An object with nothing to compare but its identity."""


@dataclass
class Named:
    """An object that is equal to others of the same name."""

    name: str = "same"


class Activation(nn.Module):
    """A layer whose class a test changes."""

    scale = 1.0

    def forward(self, hidden):
        return self.scaled(hidden)

    def scaled(self, hidden):
        return hidden * self.scale * self.factor()

    @classmethod
    def factor(cls):
        return 2.0

    @property
    def power(self):
        return 2.0


class Inherited(Activation):
    """A layer that inherits its methods."""


def with_layer(make):
    return lambda block: setattr(block, "act", make())


def on_class(owner, name, value):
    return lambda block: PATCH.setattr(owner, name, value, raising=False)


def in_act(change):
    return lambda block: change(block.act)


PATCH = pytest.MonkeyPatch()
CALL = nn.Module._call_impl
MARK, NAMED, BARE = Mark(), Named(), object()


def scaled(scale):
    return lambda block, hidden: hidden + block.down((block.up(hidden) * scale(block)).tanh().exp())


def through(layer):
    return lambda block, hidden: hidden + block.down(layer(block)(block.up(hidden)).tanh().exp())


def two_layers(hold):
    def setup(block):
        block.a, block.b = nn.Linear(8, 8), nn.Linear(8, 8)
        hold(block, block.a)

    return setup


def holds(**attributes):
    return lambda block: [setattr(block, name, value) for name, value in attributes.items()]


def to(name, value):
    return lambda block: setattr(block, name, value)


def doubled(module, args, result):
    return result * 2 if isinstance(module, nn.Linear) else None


def halved(module, args):
    return (args[0] / 2,) if isinstance(module, nn.Linear) else None


def called_twice(module, *args, **kwargs):
    result = CALL(module, *args, **kwargs)
    return CALL(module, result) if isinstance(module, nn.GELU) else result


def in_autocast(block, hidden):
    with torch.autocast("cpu", torch.get_autocast_dtype("cpu")):
        inner = block.up(hidden)
    return hidden + block.down(inner.float().tanh().exp())


HANDLES = []
CASES = {
    "is an object": (scaled(lambda b: 2.0 if b.mark is MARK else 3.0), holds(mark=Mark()), to("mark", MARK)),
    "is no object": (scaled(lambda b: 2.0 if b.mark is not MARK else 3.0), holds(mark=MARK), to("mark", Mark())),
    "is an equal one": (scaled(lambda b: 2.0 if b.mark is NAMED else 3.0), holds(mark=Named()), to("mark", NAMED)),
    "is a bare object": (scaled(lambda b: 2.0 if b.mark is BARE else 3.0), holds(mark=object()), to("mark", BARE)),
    "in a list": (scaled(lambda b: 2.0 if b.mark in [MARK] else 3.0), holds(mark=Mark()), to("mark", MARK)),
    "key of a dict": (scaled(lambda b: {MARK: 2.0}.get(b.mark, 3.0)), holds(mark=Mark()), to("mark", MARK)),
    "in a set": (scaled(lambda b: 2.0 if b.mark in {MARK} else 3.0), holds(mark=Mark()), to("mark", MARK)),
    "layer in a list": (
        through(lambda b: b.pick[0]),
        two_layers(lambda b, a: setattr(b, "pick", [a])),
        lambda b: b.pick.__setitem__(0, b.b),
    ),
    "layer in a dict": (
        through(lambda b: b.pick["it"]),
        two_layers(lambda b, a: setattr(b, "pick", {"it": a})),
        lambda b: b.pick.update(it=b.b),
    ),
    "layer in a namespace": (
        through(lambda b: b.pick.it),
        two_layers(lambda b, a: setattr(b, "pick", SimpleNamespace(it=a))),
        lambda b: setattr(b.pick, "it", b.b),
    ),
    "bound method": (
        through(lambda b: b.pick),
        two_layers(lambda b, a: setattr(b, "pick", a.forward)),
        lambda b: setattr(b, "pick", b.b.forward),
    ),
    "weight in a list": (
        through(lambda b: lambda x: x @ b.pick[0]),
        two_layers(lambda b, a: setattr(b, "pick", [a.weight])),
        lambda b: b.pick.__setitem__(0, b.b.weight),
    ),
    "negative zero": (
        scaled(lambda b: 2.0 + torch.full((), b.zero).reciprocal().sign()),
        holds(zero=0.0),
        to("zero", -0.0),
    ),
    "zero in a list": (
        scaled(lambda b: 2.0 + torch.full((), b.zeros[0]).reciprocal().sign()),
        lambda b: setattr(b, "zeros", [0.0]),
        lambda b: b.zeros.__setitem__(0, -0.0),
    ),
    "zero in a tuple": (
        scaled(lambda b: 2.0 + torch.full((), b.zeros[0]).reciprocal().sign()),
        holds(zeros=(0.0, 1.0)),
        to("zeros", (-0.0, 1.0)),
    ),
    "list in a tuple": (
        scaled(lambda b: b.pair[1][0]),
        lambda b: setattr(b, "pair", (1.0, [2.0])),
        lambda b: b.pair[1].__setitem__(0, 3.0),
    ),
    "dict in a tuple in a list": (
        scaled(lambda b: b.pairs[0][1]["it"]),
        lambda b: setattr(b, "pairs", [(1.0, {"it": 2.0})]),
        lambda b: b.pairs[0][1].update(it=3.0),
    ),
    "order of a dict": (
        scaled(lambda b: 2.0 if tuple(b.table) == ("a", "b") else 3.0),
        lambda b: setattr(b, "table", {"a": 1.0, "b": 2.0}),
        lambda b: b.table.update(a=b.table.pop("a")),
    ),
    "names in a dict": (
        scaled(lambda b: 2.0 if list(b.table) == ["a"] else 3.0),
        lambda b: setattr(b, "table", {"a": 1.0}),
        lambda b: setattr(b, "table", {"b": 1.0}),
    ),
    "order of an ordered dict": (
        scaled(lambda b: next(iter(b.table.values()))),
        lambda b: setattr(b, "table", OrderedDict(a=2.0, b=3.0)),
        lambda b: b.table.move_to_end("a"),
    ),
    "order of a copied dict": (
        scaled(lambda b: next(iter({**b.table}.values()))),
        lambda b: setattr(b, "table", {"a": 2.0, "b": 3.0}),
        lambda b: b.table.update(a=b.table.pop("a")),
    ),
    "names in an unpacked dict": (
        scaled(lambda b: 2.0 if [*b.table] == ["a"] else 3.0),
        lambda b: setattr(b, "table", {"a": 1.0}),
        lambda b: setattr(b, "table", {"b": 1.0}),
    ),
    "new variable of the environment": (
        scaled(lambda b: float(os.environ.get("ADACC_TEST_SCALE", "1"))),
        holds(),
        lambda b: os.environ.update(ADACC_TEST_SCALE="2"),
    ),
    "whether a variable is there": (
        scaled(lambda b: 2.0 if "ADACC_TEST_SCALE" in os.environ else 3.0),
        holds(),
        lambda b: os.environ.update(ADACC_TEST_SCALE="2"),
    ),
    "variable that goes": (
        scaled(lambda b: float(os.getenv("ADACC_TEST_SCALE", "1"))),
        lambda b: os.environ.update(ADACC_TEST_SCALE="3"),
        lambda b: os.environ.pop("ADACC_TEST_SCALE", None),
    ),
    "another environment": (
        scaled(lambda b: float(os.environ.get("ADACC_TEST_SCALE", "1"))),
        holds(),
        lambda b: PATCH.setattr(os, "environ", {**os.environ, "ADACC_TEST_SCALE": "2"}),
    ),
    "whether two weights are one": (
        scaled(lambda b: 2.0 if b.a.weight is b.b.weight else 3.0),
        two_layers(lambda b, a: None),
        lambda b: setattr(b.b, "weight", b.a.weight),
    ),
    "forward of a class": (
        through(lambda b: b.act),
        with_layer(Activation),
        on_class(Activation, "forward", lambda self, hidden: hidden.sin()),
    ),
    "method of a class": (
        through(lambda b: b.act),
        with_layer(Activation),
        on_class(Activation, "scaled", lambda self, hidden: hidden.sin()),
    ),
    "inherited method": (
        through(lambda b: b.act),
        with_layer(Inherited),
        on_class(Activation, "scaled", lambda self, hidden: hidden.sin()),
    ),
    "method that hides an inherited one": (
        through(lambda b: b.act),
        with_layer(Inherited),
        on_class(Inherited, "scaled", lambda self, hidden: hidden.sin()),
    ),
    "attribute that hides an inherited one": (
        through(lambda b: b.act),
        with_layer(Inherited),
        on_class(Inherited, "scale", 3.0),
    ),
    "method of a class alone": (
        through(lambda b: b.act),
        with_layer(Activation),
        on_class(Activation, "factor", classmethod(lambda cls: 3.0)),
    ),
    "property": (
        scaled(lambda b: b.act.power),
        with_layer(Activation),
        on_class(Activation, "power", property(lambda self: 3.0)),
    ),
    "forward of torch's layer": (
        through(lambda b: b.act),
        with_layer(nn.GELU),
        on_class(nn.GELU, "forward", lambda self, hidden: hidden.sin()),
    ),
    "call of a class": (
        through(lambda b: b.act),
        with_layer(Activation),
        on_class(Activation, "__call__", lambda self, hidden: hidden.sin()),
    ),
    "call of all modules": (
        through(lambda b: b.act),
        with_layer(nn.GELU),
        on_class(nn.Module, "_call_impl", called_twice),
    ),
    "class of a layer": (
        through(lambda b: b.act),
        with_layer(nn.GELU),
        in_act(lambda act: setattr(act, "__class__", nn.Tanh)),
    ),
    "new name in a __dict__": (
        scaled(lambda b: 2.0 if "extra" in b.act.__dict__ else 3.0),
        with_layer(nn.GELU),
        in_act(lambda act: setattr(act, "extra", 1)),
    ),
    "name to get from a __dict__": (
        scaled(lambda b: vars(b.space).get("extra", 3.0)),
        lambda b: setattr(b, "space", SimpleNamespace()),
        lambda b: setattr(b.space, "extra", 2.0),
    ),
    "length of a __dict__": (
        scaled(lambda b: len(vars(b.mark)) + 1.0),
        lambda b: setattr(b, "mark", Mark()),
        lambda b: setattr(b.mark, "extra", 2.0),
    ),
    "hook on all modules": (
        through(lambda b: b.up2),
        lambda b: setattr(b, "up2", nn.Linear(8, 8)),
        lambda b: HANDLES or HANDLES.append(nn.modules.module.register_module_forward_hook(doubled)),
    ),
    "hook before all modules": (
        through(lambda b: b.up2),
        lambda b: setattr(b, "up2", nn.Linear(8, 8)),
        lambda b: HANDLES or HANDLES.append(nn.modules.module.register_module_forward_pre_hook(halved)),
    ),
    "what autocast casts to": (
        in_autocast,
        holds(),
        lambda b: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "kernels of attention": (
        lambda b, x: x + b.down(nn.functional.scaled_dot_product_attention(*[b.up(x)[:, None]] * 3)[:, 0].tanh()),
        holds(),
        lambda b: torch.backends.cuda.enable_flash_sdp(False),
    ),
}


def put_back():
    while HANDLES:
        HANDLES.pop().remove()
    PATCH.undo()
    os.environ.pop("ADACC_TEST_SCALE", None)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def as_before():
    yield
    put_back()


@pytest.mark.parametrize("case", CASES)
def test_what_no_guard_of_dynamos_sees_is_followed(toy_model, toy_batch, run_steps, assert_same_steps, case):
    forward, setup, change = CASES[case]
    batch = toy_batch()

    def train_steps(policy):
        model = toy_model(forward, setup=setup)
        profile = policy and profile_model(model, batch, CONFIG)
        handle = policy and apply_policy(model, uniform_policy(profile, "recompute"), CONFIG)
        steps = run_steps(model, batch, num_steps=4)
        for block in model.layers:
            change(block)
        steps += run_steps(model, batch, num_steps=3)
        if handle:
            handle.remove()
        return steps

    plain = train_steps(policy=False)
    put_back()
    assert_same_steps(train_steps(policy=True), plain)
