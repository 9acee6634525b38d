"""Gradients of a profile or a comparison do not reach gradient hooks."""

import pytest
import torch
from recomputed_models import recompute_all
from torch import nn

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.adapt.gradient_check import BlockSample
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.tensors import without_gradient_hooks

HOOKS = {"before it is accumulated": "register_hook", "after": "register_post_accumulate_grad_hook"}


@pytest.fixture(params=HOOKS)
def hooked_model(request, tiny_gpt2):
    """A model, and the list of gradients that hooks on its parameters were called with."""
    model, gradients = tiny_gpt2(), []
    for parameter in model.parameters():
        getattr(parameter, HOOKS[request.param])(gradients.append)
    return model, gradients


@pytest.mark.parametrize("measure", [lambda m, b: profile_model(m, b, AdaccConfig()), measure_step])
def test_nobody_hears_of_a_profile(hooked_model, token_batch, measure):
    model, gradients = hooked_model
    measure(model, token_batch())
    assert gradients == []
    model(**token_batch()).loss.backward()
    assert len(gradients) == len(list(model.parameters()))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("measure", [lambda m, b: profile_model(m, b, AdaccConfig()), measure_step])
def test_a_profile_calls_no_backward_hooks_of_modules(tiny_gpt2, token_batch, register, measure):
    """DeepSpeed sends the gradients of a leaf module in such a hook, which must not happen outside a step."""
    model, calls = tiny_gpt2(), []
    modules = [model.transformer.h[0], model.transformer.h[1].mlp]
    for module in modules:
        getattr(module, register)(lambda module, *_: calls.append(module))
    measure(model, token_batch())
    assert calls == []
    model(**token_batch()).loss.backward()
    assert set(calls) == set(modules)


def test_nobody_hears_of_a_compared_gradient(hooked_model, token_batch):
    model, gradients = hooked_model
    with recompute_all(model, token_batch(), AdaccConfig()) as handle:
        sample = BlockSample(handle.plans.strategies["transformer.h.1"])
        model(**token_batch()).loss.backward()
        gradients.clear()
        assert sample.compare() == 0
    assert gradients == []


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
