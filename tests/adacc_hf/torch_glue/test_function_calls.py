"""Interception of the calls of autograd Functions, also through an `apply` that was looked up before."""

import pytest
import torch
from torch.autograd.function import FunctionMeta

from adacc_hf.torch_glue.function_calls import begin_watching, end_watching


class Cube(torch.autograd.Function):
    """x ** 3, whose forward gets the context."""

    num_forwards = num_setups = 0

    @staticmethod
    def forward(ctx, x, offset=0.0):
        Cube.num_forwards += 1
        squared = x * x
        ctx.save_for_backward(x, None, squared)
        return x * squared + offset

    @staticmethod
    def backward(ctx, gradient):
        _, _, squared = ctx.saved_tensors
        return 3 * squared * gradient, None


class CubeWithSetup(torch.autograd.Function):
    """x ** 3, whose forward gets no context."""

    num_forwards = num_setups = 0

    @staticmethod
    def forward(x, offset=0.0):
        CubeWithSetup.num_forwards += 1
        return x * x * x + offset

    @staticmethod
    def setup_context(ctx, inputs, output):
        CubeWithSetup.num_setups += 1
        x, offset = inputs
        assert offset == 0.0
        ctx.save_for_backward(x, x)

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return 3 * (x * x) * gradient, None


cube, cube_with_setup = Cube.apply, CubeWithSetup.apply
"""Methods that are looked up before a watcher begins."""


@pytest.fixture
def calls():
    """Watch the calls of Functions. Yield the list of (call, saved tensors before and after the forward)."""
    seen = []

    def watch(call):
        assert not torch.is_grad_enabled()
        before = call.saved
        result = call.run()
        seen.append((call, before, call.saved))
        return result

    begin_watching(watch)
    yield seen
    end_watching()


@pytest.fixture
def x():
    return torch.randn(3, requires_grad=True)


APPLIES = {
    "early": (lambda x: cube(x), Cube),
    "late": (lambda x: Cube.apply(x), Cube),
    "early, setup": (lambda x: cube_with_setup(x), CubeWithSetup),
    "late, setup": (lambda x: CubeWithSetup.apply(x), CubeWithSetup),
}


@pytest.mark.parametrize(("apply", "function"), APPLIES.values(), ids=APPLIES)
def test_a_call_is_seen_once_with_its_arguments_and_saved_tensors(calls, x, apply, function):
    num_before = function.num_forwards, function.num_setups
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        result = apply(x)
    ((call, before, after),) = calls
    assert call.function is function
    assert call.args[0] is x
    assert before == []
    assert [tensor.data_ptr() for tensor in after] == packed
    assert len(packed) == 2
    num_setups = int(function is CubeWithSetup)
    assert (function.num_forwards, function.num_setups) == (num_before[0] + 1, num_before[1] + num_setups)
    assert torch.equal(result, x * x * x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, 3 * (x * x))


def test_calls_are_not_seen_after_the_end(x):
    before, seen = dict(vars(FunctionMeta)), []
    begin_watching(lambda call: seen.append(call) or call.run())
    cube(x)
    end_watching()
    cube(x)
    assert len(seen) == 1
    assert dict(vars(FunctionMeta)) == before
