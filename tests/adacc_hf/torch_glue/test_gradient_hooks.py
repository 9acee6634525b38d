"""Gradients that nobody trains with reach nobody who waits for some."""

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.adapt.gradient_check import BlockSample
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.tensors import without_gradient_hooks

HOOKS = {"before it is accumulated": "register_hook", "after": "register_post_accumulate_grad_hook"}


@pytest.fixture(params=HOOKS)
def told(request, tiny_gpt2):
    """A model, and a list that grows with every gradient of a parameter that a hook was told of."""
    model, told = tiny_gpt2(), []
    for parameter in model.parameters():
        getattr(parameter, HOOKS[request.param])(told.append)
    return model, told


@pytest.mark.parametrize("measure", [lambda m, b: profile_model(m, b, AdaccConfig()), measure_step])
def test_nobody_hears_of_a_profile(told, token_batch, measure):
    """An optimizer that steps inside backward would move the weights, ZeRO would send gradients to other ranks."""
    model, told = told
    measure(model, token_batch())
    assert told == []
    model(**token_batch()).loss.backward()
    assert len(told) == len(list(model.parameters()))


def test_nobody_hears_of_a_compared_gradient(told, token_batch):
    model, told = told
    profile = profile_model(model, token_batch(), AdaccConfig())
    with apply_policy(model, uniform_policy(profile, "recompute")) as handle:
        sample = BlockSample(handle.plans.strategies["transformer.h.1"])
        model(**token_batch()).loss.backward()
        told.clear()
        assert sample.compare().error == 0
    assert told == []


def test_hooks_are_back_after_an_error_and_can_be_removed():
    parameter, calls = nn.Parameter(torch.ones(2)), []
    handles = [parameter.register_post_accumulate_grad_hook(lambda _, n=n: calls.append(n)) for n in range(2)]

    def fail():
        (parameter * 2).sum().backward()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), without_gradient_hooks([parameter]):
        fail()
    assert calls == []
    handles[0].remove()
    (parameter * 2).sum().backward()
    assert calls == [1]
