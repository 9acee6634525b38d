"""Changes between steps that Dynamo's guards do not cover (identities, paths to a weight, classes, the environment),
and changed code of a block."""

import os
from collections import OrderedDict
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


class Mark:
    """An object with nothing to compare but its identity."""


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


def in_part(part, name, make):
    """Return a change that sets an attribute of a part of a block."""
    return lambda block: setattr(getattr(block, part), name, make(block))


PATCH = pytest.MonkeyPatch()
CALL = nn.Module._call_impl
MARK = Mark()


def scaled(scale):
    return lambda block, hidden: hidden + block.down((block.up(hidden) * scale(block)).tanh().exp())


def chosen(condition):
    return scaled(lambda block: 2.0 if condition(block) else 3.0)


def signed(read):
    """Scale a block by a number that depends on the sign of a zero."""
    return scaled(lambda block: 2.0 + torch.full((), read(block)).reciprocal().sign())


def through(layer):
    return lambda block, hidden: hidden + block.down(layer(block)(block.up(hidden)).tanh().exp())


def two_layers(hold):
    def setup(block):
        block.a, block.b = nn.Linear(8, 8), nn.Linear(8, 8)
        hold(block, block.a)

    return setup


def picks(make):
    return two_layers(lambda block, layer: setattr(block, "pick", make(layer)))


def holds(**attributes):
    return lambda block: [setattr(block, name, value) for name, value in attributes.items()]


def to(name, value):
    return lambda block: setattr(block, name, value)


def fresh(name, make):
    """Return a change that gives each block an object of its own."""
    return lambda block: setattr(block, name, make())


def turn(block):
    block.table["a"] = block.table.pop("a")


def set_variable(value):
    return lambda block: os.environ.update(ADACC_TEST_SCALE=value)


def hooked(kind, hook):
    register = getattr(nn.modules.module, f"register_module_{kind}")
    return lambda block: HANDLES or HANDLES.append(register(hook))


def sine(layer, hidden):
    return hidden.sin()


def doubled(module, args, result):
    return result * 2 if isinstance(module, nn.Linear) else None


def halved(module, args):
    return (args[0] / 2,) if isinstance(module, nn.Linear) else None


def called_twice(module, *args, **kwargs):
    result = CALL(module, *args, **kwargs)
    return CALL(module, result) if isinstance(module, nn.GELU) else result


def half(block, hidden):
    return hidden + 0.5 * block.down(block.up(hidden)).relu()


def in_autocast(block, hidden):
    with torch.autocast("cpu", torch.get_autocast_dtype("cpu")):
        inner = block.up(hidden)
    return hidden + block.down(inner.float().tanh().exp())


HANDLES = []
A, B, AB = (
    fresh("table", lambda names=names: {name: float(place) for place, name in enumerate(names, 2)})
    for names in ("a", "b", "ab")
)
ACT = through(lambda b: b.act)
BY_VARIABLE = scaled(lambda b: float(os.environ.get("ADACC_TEST_SCALE", "1")))
LINEAR = with_layer(lambda: nn.Linear(8, 8))
CASES = {
    "is an object": (chosen(lambda b: b.mark is MARK), holds(mark=Mark()), to("mark", MARK)),
    "is no object": (chosen(lambda b: b.mark is not MARK), holds(mark=MARK), to("mark", Mark())),
    "in a list": (chosen(lambda b: b.mark in [MARK]), holds(mark=Mark()), to("mark", MARK)),
    "key of a dict": (scaled(lambda b: {MARK: 2.0}.get(b.mark, 3.0)), holds(mark=Mark()), to("mark", MARK)),
    "layer in a list": (through(lambda b: b.pick[0]), picks(lambda a: [a]), lambda b: b.pick.__setitem__(0, b.b)),
    "layer in a namespace": (
        through(lambda b: b.pick.it),
        picks(lambda a: SimpleNamespace(it=a)),
        in_part("pick", "it", lambda b: b.b),
    ),
    "bound method": (through(lambda b: b.pick), picks(lambda a: a.forward), lambda b: setattr(b, "pick", b.b.forward)),
    "weight in a list": (
        through(lambda b: lambda x: x @ b.pick[0]),
        picks(lambda a: [a.weight]),
        lambda b: b.pick.__setitem__(0, b.b.weight),
    ),
    "negative zero": (signed(lambda b: b.zero), holds(zero=0.0), to("zero", -0.0)),
    "zero in a list": (
        signed(lambda b: b.zeros[0]),
        fresh("zeros", lambda: [0.0]),
        lambda b: b.zeros.__setitem__(0, -0.0),
    ),
    "list in a tuple": (
        scaled(lambda b: b.pair[1][0]),
        fresh("pair", lambda: (1.0, [2.0])),
        lambda b: b.pair[1].__setitem__(0, 3.0),
    ),
    "order of a dict": (chosen(lambda b: tuple(b.table) == ("a", "b")), AB, turn),
    "names in a dict": (chosen(lambda b: list(b.table) == ["a"]), A, B),
    "order of an ordered dict": (
        scaled(lambda b: next(iter(b.table.values()))),
        fresh("table", lambda: OrderedDict(a=2.0, b=3.0)),
        lambda b: b.table.move_to_end("a"),
    ),
    "new variable of the environment": (BY_VARIABLE, holds(), set_variable("2")),
    "variable that goes": (
        scaled(lambda b: float(os.getenv("ADACC_TEST_SCALE", "1"))),
        set_variable("3"),
        lambda b: os.environ.pop("ADACC_TEST_SCALE", None),
    ),
    "another environment": (
        BY_VARIABLE,
        holds(),
        lambda b: PATCH.setattr(os, "environ", {**os.environ, "ADACC_TEST_SCALE": "2"}),
    ),
    "whether two weights are one": (
        chosen(lambda b: b.a.weight is b.b.weight),
        two_layers(lambda b, a: None),
        in_part("b", "weight", lambda b: b.a.weight),
    ),
    "forward of a class": (ACT, with_layer(Activation), on_class(Activation, "forward", sine)),
    "method of a class": (ACT, with_layer(Activation), on_class(Activation, "scaled", sine)),
    "method that hides an inherited one": (ACT, with_layer(Inherited), on_class(Inherited, "scaled", sine)),
    "method of a class alone": (
        ACT,
        with_layer(Activation),
        on_class(Activation, "factor", classmethod(lambda cls: 3.0)),
    ),
    "property": (
        scaled(lambda b: b.act.power),
        with_layer(Activation),
        on_class(Activation, "power", property(lambda self: 3.0)),
    ),
    "call of a class": (ACT, with_layer(Activation), on_class(Activation, "__call__", sine)),
    "call of all modules": (ACT, with_layer(nn.GELU), on_class(nn.Module, "_call_impl", called_twice)),
    "class of a layer": (ACT, with_layer(nn.GELU), in_part("act", "__class__", lambda b: nn.Tanh)),
    "new name in a __dict__": (
        chosen(lambda b: "extra" in b.act.__dict__),
        with_layer(nn.GELU),
        in_part("act", "extra", lambda b: 1),
    ),
    "name to get from a __dict__": (
        scaled(lambda b: vars(b.space).get("extra", 3.0)),
        fresh("space", lambda: SimpleNamespace()),
        in_part("space", "extra", lambda b: 2.0),
    ),
    "type of a number": (chosen(lambda b: isinstance(b.number, float)), holds(number=1), to("number", 1.0)),
    "truth for a number": (chosen(lambda b: b.number is True), holds(number=1), to("number", True)),
    "transposed weight": (ACT, LINEAR, lambda b: setattr(b.act.weight, "data", b.act.weight.data.t())),
    "hook on all modules": (ACT, LINEAR, hooked("forward_hook", doubled)),
    "hook before all modules": (ACT, LINEAR, hooked("forward_pre_hook", halved)),
    "hook on a layer": (
        ACT,
        with_layer(nn.GELU),
        lambda b: b.act.register_forward_hook(lambda module, args, result: result * 1.5),
    ),
    "another layer": (ACT, with_layer(nn.GELU), with_layer(nn.Tanh)),
    "function in place of a method": (ACT, with_layer(Activation), in_part("act", "scaled", lambda b: torch.tanh)),
    "pruned layer": (ACT, LINEAR, lambda b: prune.l1_unstructured(b.act, "weight", amount=0.3)),
    "parametrized layer": (ACT, LINEAR, lambda b: parametrizations.weight_norm(b.act)),
    "forward of the blocks' class": (ACT, with_layer(nn.GELU), lambda b: PATCH.setattr(type(b), "forward", half)),
    "forward of a block": (ACT, with_layer(nn.GELU), lambda b: setattr(b, "forward", MethodType(half, b))),
    "class of a block": (
        ACT,
        with_layer(nn.GELU),
        lambda b: setattr(b, "__class__", type("Other", (type(b),), {"forward": half})),
    ),
    "what autocast casts to": (in_autocast, holds(), lambda b: torch.set_autocast_dtype("cpu", torch.float16)),
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


def in_gate(name):
    return pytest.param(name, marks=[pytest.mark.gate] * (name == "new variable of the environment"))


@pytest.mark.parametrize("case", [in_gate(name) for name in CASES])
def test_what_changes_between_steps_is_followed(toy_model, toy_batch, run_steps, assert_same_steps, case):
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
