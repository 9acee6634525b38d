"""Functions that Dynamo cannot trace, as one node of a trace."""

from types import SimpleNamespace

import pytest
import torch
from function_builders import read_unseen, write_unseen

from adacc_hf.torch_glue.dynamo import NotTraceableError, trace
from adacc_hf.torch_glue.opaque_functions import Result, describe_results, opaque_functions

SETTINGS = SimpleNamespace(factor=3.0)  # an object that no graph can hold


class ByAddress(torch.autograd.Function):
    """A Function that Dynamo cannot trace, because it fills memory by address."""

    @staticmethod
    def forward(ctx, settings, x):
        out = torch.empty_like(x)
        write_unseen(out, read_unseen(x) * settings.factor)
        return out, x.detach().sum(0)

    @staticmethod
    def backward(ctx, gradient, _):
        return None, gradient


def through(x):
    out, total = ByAddress.apply(SETTINGS, x.tanh())
    return out.exp() + total


def scope_of(x):
    return {"call": through, "args": (x,), "kwargs": {}}


def test_results_are_described_by_the_sizes_of_arguments():
    x, y = torch.ones(5, 3), torch.ones(7)
    described = describe_results((x, y), (x + 1, {"first": y, "wide": torch.ones(7, 5, 4, dtype=torch.int32)}, 2))
    assert described == (
        Result(None, ((0, 0), (0, 1)), x.dtype),
        {"first": Result(1, ((1, 0),), y.dtype), "wide": Result(None, ((1, 0), (0, 0), 4), torch.int32)},
        2,
    )


def test_a_function_that_cannot_be_traced_is_left_out_of_a_trace():
    x, before = torch.ones(5, 3, requires_grad=True), dict(vars(ByAddress))
    with pytest.raises(NotTraceableError):
        trace(scope_of(x))
    opaque = {ByAddress: describe_results((SETTINGS, x), ByAddress.apply(SETTINGS, x))}
    guards = trace(scope_of(x), opaque=opaque)
    assert dict(vars(ByAddress)) == before
    assert guards.is_partial
    assert not trace({**scope_of(x), "call": torch.tanh}, opaque=opaque).is_partial  # meets no such Function
    for size in (5, 9):  # one trace for all sizes
        assert guards.hold(scope_of(torch.ones(size, 3, requires_grad=True)))
    assert not guards.hold(scope_of(torch.ones(5, 3, dtype=torch.float64, requires_grad=True)))


def test_an_error_leaves_the_functions_as_they_were():
    allowed, before = {1}, dict(vars(ByAddress))
    with pytest.raises(KeyError), opaque_functions({ByAddress: None}, allowed, set()):
        raise KeyError(id(ByAddress) in allowed)
    assert allowed == {1}
    assert dict(vars(ByAddress)) == before
