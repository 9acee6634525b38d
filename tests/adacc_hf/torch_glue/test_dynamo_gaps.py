"""Guards that Dynamo lacks, patches of Dynamo that last as long as a trace, and Functions that it cannot trace."""

import gc
from types import SimpleNamespace

import pytest
import torch
from function_builders import read_unseen, write_unseen
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import dicts, user_defined

from adacc_hf.torch_glue.dynamo import ClassReads, NotTraceableError, trace
from adacc_hf.torch_glue.dynamo_gaps import (
    Result,
    class_read_patches,
    describe_results,
    dict_order_patches,
    identity_patches,
    opaque_functions,
)
from adacc_hf.torch_glue.watchers import patched


def test_a_class_that_is_gone_is_not_current():
    class Short:
        factor = 1

    reads = ClassReads([(Short, "factor")])
    assert reads.are_current()
    del Short
    gc.collect()
    assert not reads.are_current()


def patched_attributes():
    """Return the attributes of Dynamo that the contexts may replace."""
    owners = [symbolic_convert, user_defined.UserDefinedObjectVariable, user_defined.UserDefinedClassVariable]
    owners += [value for value in vars(dicts).values() if isinstance(value, type)]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("patches", [lambda: class_read_patches({}, []), lambda: dict_order_patches([])])
def test_dynamo_is_as_before_after_an_error(patches):
    before, inside = patched_attributes(), {}

    def fail():
        inside.update(patched_attributes())
        raise KeyError

    with pytest.raises(KeyError), patched([*identity_patches([]), *patches()]):
        fail()
    after = patched_attributes()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert any(inside[name] is not before[name] for name in before), "the patches replace something"


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
