"""Changes between steps that Dynamo's own guards do not see: identities, ways to a weight, signs of zeros."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model

CONFIG = AdaccConfig(min_compress_bytes=0)


class Mark:
    """An object that is known by nothing but itself."""


@dataclass
class Named:
    """An object that is equal to others of the same name."""

    name: str = "same"


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
    "new variable of the environment": (
        scaled(lambda b: float(os.environ.get("ADACC_TEST_SCALE", "1"))),
        holds(),
        lambda b: os.environ.update(ADACC_TEST_SCALE="2"),
    ),
    "kernels of attention": (
        lambda b, x: x + b.down(nn.functional.scaled_dot_product_attention(*[b.up(x)[:, None]] * 3)[:, 0].tanh()),
        holds(),
        lambda b: torch.backends.cuda.enable_flash_sdp(False),
    ),
}


@pytest.fixture(autouse=True)
def put_back():
    yield
    os.environ.pop("ADACC_TEST_SCALE", None)
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("case", CASES)
def test_what_no_guard_of_dynamos_sees_is_followed(toy_model, toy_batch, run_steps, assert_same_steps, case):
    forward, setup, change = CASES[case]
    batch = toy_batch()

    def trained(policy):
        model = toy_model(forward, setup=setup)
        profile = policy and profile_model(model, batch, CONFIG)
        handle = policy and apply_policy(model, Policy.uniform(profile, "recompute"), CONFIG)
        steps = run_steps(model, batch, num_steps=4)
        for block in model.layers:
            change(block)
        steps += run_steps(model, batch, num_steps=3)
        if handle:
            handle.remove()
        return steps

    plain = trained(policy=False)
    os.environ.pop("ADACC_TEST_SCALE", None)
    torch.backends.cuda.enable_flash_sdp(True)
    assert_same_steps(trained(policy=True), plain)
