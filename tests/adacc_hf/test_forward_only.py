"""Numbers and hooks that stand in the forward only, and differ at every step: equal to plain training, or refused."""

from contextlib import contextmanager, suppress

import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import CheckpointMismatchError, TapeMismatchError
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)
NUM_STEPS = 4
SCALES = {"factor": 1.0}


class Factor:
    value = 1.0


def forward(block, hidden):
    scale = block.scale * SCALES["factor"] * Factor.value * block.items[0]
    return hidden + block.down((block.up(hidden) * scale).tanh().exp())


def setup(block):
    block.scale, block.items = 1.0, [1.0]


@contextmanager
def attribute(model, number):
    for block in model.layers:
        block.scale = number
    yield
    for block in model.layers:
        block.scale = 1.0


@contextmanager
def whole_number(model, number):
    with attribute(model, round(8 * number)):
        yield


@contextmanager
def item(model, number):
    for block in model.layers:
        block.items[0] = number
    yield
    for block in model.layers:
        block.items[0] = 1.0


@contextmanager
def global_number(model, number):
    SCALES["factor"] = number
    yield
    SCALES["factor"] = 1.0


@contextmanager
def class_attribute(model, number):
    Factor.value = number
    yield
    Factor.value = 1.0


@contextmanager
def hook(model, number):
    handles = [block.up.register_forward_hook(lambda module, args, out: out * number) for block in model.layers]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def pre_hook(model, number):
    handles = [block.down.register_forward_pre_hook(lambda module, args: (args[0] + number,)) for block in model.layers]
    yield
    for handle in handles:
        handle.remove()


STANDING = (attribute, whole_number, item, global_number, class_attribute, hook, pre_hook)


def step(model, batch, standing, number):
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with standing(model, number):
        loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "standing", [pytest.param(each, marks=[pytest.mark.gate] * (each in (attribute, hook))) for each in STANDING]
)
def test_what_stands_in_forward_only_never_changes_a_gradient_silently(toy_model, toy_batch, standing):
    """Each step is exact until, in some cases, the run stops with words."""
    model, batch = toy_model(forward, setup=setup), toy_batch()
    numbers = [1.0 + number / 8 for number in range(NUM_STEPS)]
    plain = [step(model, batch, standing, number) for number in numbers]
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    num_exact = 0
    with apply_policy(model, policy, CONFIG), suppress(CheckpointMismatchError, TapeMismatchError):
        for number, expected in zip(numbers, plain, strict=True):
            assert all(map(torch.equal, step(model, batch, standing, number), expected))
            num_exact += 1
    assert num_exact > 1
