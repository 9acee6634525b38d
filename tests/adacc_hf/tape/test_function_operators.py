"""Operators on a tape for an `autograd.Function` whose kernels write by address (rules R5, R6, R7)."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from function_builders import Scale, ScaleInPlace, in_a_closure, names_of, read_unseen, tanh_of, through, write_unseen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_builders import gradients_of
from torch.autograd.function import BackwardCFunction

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import TapeMismatchError
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.function_operators import FunctionTarget, call_of
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)


@dataclass(frozen=True)
class Shape:
    """The differences between the Functions of the property test."""

    has_setup: bool
    dtype: torch.dtype
    saved: tuple[str, ...]
    result: str
    uses_operators: bool
    weights: str
    materializes: bool
    autocast: bool
    samples: int
    attributes: dict = field(default_factory=dict, hash=False)


def make_function(shape):
    """Return a Function of that shape. Its backward is no derivative, and depends on every bit of the saved tensors."""

    def compute(x, weights, scale):
        weight = weights if isinstance(weights, torch.Tensor) else weights[0]
        inner, out = torch.empty_like(x), torch.empty(x.shape, dtype=x.dtype)
        write_unseen(inner, read_unseen(x) * scale)
        write_unseen(out, np.tanh(read_unseen(inner)) * read_unseen(weight.contiguous()))
        if shape.uses_operators:
            inner = (inner * 2).sigmoid()
        return {"x": x, "weight": weight, "inner": inner, "out": out}

    def result_of(tensors):
        out = tensors["out"]
        return {
            "tensor": out,
            "pair": (out, tensors["inner"] if "inner" in shape.saved else out.clone()),
            "with number": (out, out.shape[0]),
            "with none": (None, out),
        }[shape.result]

    def save(ctx, tensors):
        ctx.save_for_backward(*[None if name == "none" else tensors[name] for name in shape.saved])
        ctx.set_materialize_grads(shape.materializes)
        ctx.scale = 0.5
        if shape.result == "pair":
            ctx.mark_non_differentiable(result_of(tensors)[1])

    def backward(ctx, *gradients):
        gradient = next(g for g in gradients if g is not None and g.dtype is shape.dtype)
        for tensor in ctx.saved_tensors:
            if tensor is not None:
                gradient = gradient * (ctx.scale + tensor.to(gradient.dtype).mean())
        is_weight = shape.weights == "tensor" and ctx.needs_input_grad[1]
        return gradient if ctx.needs_input_grad[0] else None, gradient.sum((0, 1)) if is_weight else None, None

    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weights, scale):
            tensors = compute(x, weights, scale)
            save(ctx, tensors)
            return result_of(tensors)

    class New(torch.autograd.Function):
        @staticmethod
        def forward(x, weights, scale=1.5):
            return result_of(compute(x, weights, scale))

        @staticmethod
        def setup_context(ctx, inputs, output):
            out = output if isinstance(output, torch.Tensor) else next(t for t in output if isinstance(t, torch.Tensor))
            save(ctx, {"x": inputs[0], "weight": inputs[1], "inner": out, "out": out, "none": None})

    function_class = New if shape.has_setup else Old
    function_class.backward = staticmethod(backward)
    return function_class


@st.composite
def shapes(draw):
    has_setup = draw(st.booleans())
    names = ["x", "out", "none"] if has_setup else ["x", "inner", "out", "none"]
    weights = draw(st.sampled_from(["tensor"] if has_setup else ["tensor", "list"]))
    return Shape(
        has_setup=has_setup,
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        saved=tuple(draw(st.lists(st.sampled_from(names), max_size=4))),
        result=draw(st.sampled_from(["tensor", "with number", "with none"] if has_setup else RESULTS)),
        uses_operators=draw(st.booleans()),
        weights=weights,
        materializes=draw(st.booleans()),
        autocast=draw(st.booleans()),
        samples=draw(st.integers(2, 4)),
    )


RESULTS = ["tensor", "pair", "with number", "with none"]


def first_tensor(result):
    return result if isinstance(result, torch.Tensor) else next(t for t in result if isinstance(t, torch.Tensor))


def forward_with(function, shape):
    def forward(block, hidden):
        x = block.up(hidden).to(shape.dtype).contiguous()
        weight = block.down.weight[0].to(shape.dtype)
        weights = {"tensor": weight, "list": [weight.detach()]}[shape.weights]
        out = first_tensor(function.apply(x, weights, 1.5))
        return hidden + block.down(out.to(hidden.dtype)).tanh()

    return forward


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes())
def test_any_function_is_replayed_bit_for_bit(toy_model, toy_batch, assert_exact, shape):
    function = make_function(shape)
    model = toy_model(forward_with(function, shape))
    profile = assert_exact(
        model, toy_batch(shape.samples), num_policies=2, autocast=torch.bfloat16 if shape.autocast else None
    )
    kind = profile.kinds[0]
    assert kind.untrusted is None
    assert [operator.name for operator in kind.operators].count(str(FunctionTarget(function))) == 1
    assert all(value.recomputable for value in kind.activations if value.producer is not None and not value.is_decision)


# Functions that each test one thing.


class Outer(torch.autograd.Function):
    """A Function that calls another one."""

    @staticmethod
    def forward(ctx, x):
        return Scale.apply(Scale.apply(x, 2.0), 2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 4


scale_taken_early = Scale.apply


REPLAYED = {
    "kernel": (Scale.apply, Scale),
    "taken early": (scale_taken_early, Scale),
    "in place, unseen": (ScaleInPlace.apply, ScaleInPlace),
    "nested": (Outer.apply, Outer),
}


@pytest.mark.parametrize(("function", "cls"), REPLAYED.values(), ids=REPLAYED)
def test_what_a_function_makes_is_recomputed_within_the_predicted_peak(
    toy_model, toy_batch, assert_exact, peak_of, function, cls
):
    model, batch = toy_model(through(function)), toy_batch(64)
    profile = assert_exact(model, batch, num_policies=2)
    assert tanh_of(profile).recomputable
    assert names_of(profile).count(str(FunctionTarget(cls))) == 1
    assert not any("Scale" in name for name in names_of(profile)) or cls is not Outer
    policy = uniform_policy(profile, "recompute")
    with apply_policy(model, policy, CONFIG):
        for _ in range(3):
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        memory = measure_step(model, batch)
    assert memory.stored_bytes == policy.predicted_stored_bytes
    assert memory.peak_bytes == peak_of(policy)


def test_classes_of_one_name_are_told_apart(record_call):
    x = torch.randn(2, 8, requires_grad=True)
    factories = [in_a_closure(Scale) for _ in range(2)]
    names = {str(FunctionTarget(cls)) for cls in factories}
    identities = {call_of(cls, (x,)).identity for cls in factories}
    assert (len(names), len(identities)) == (1, 2)


# Data that a Function reads into Python.


class Reading(Scale):
    """A Function with a tensor of lengths, of which it reads the largest into Python."""

    @staticmethod
    def forward(ctx, x, lengths):
        return Scale.forward(ctx, x, float(lengths.max().item()))


def read_of_what_it_made(block, hidden):
    x = block.up(hidden)
    return hidden + block.down(Reading.apply(x, x.detach().abs()).tanh())


def test_data_that_the_block_made_leaves_it_to_torch(toy_model, toy_batch, assert_exact):
    profile = assert_exact(toy_model(read_of_what_it_made), toy_batch())
    assert "reads data into Python" in profile.kinds[0].untrusted


# Sizes.


class Padding(torch.autograd.Function):
    """A Function with sizes as arguments, which saves a tensor larger than its input."""

    @staticmethod
    def forward(ctx, x, samples, parts):
        wide, out = x.new_empty(samples, 2, *x.shape[1:]), torch.empty_like(x)
        write_unseen(wide, np.stack([read_unseen(x), 2 * read_unseen(x)], axis=1))
        write_unseen(out, read_unseen(wide)[:, 0] * read_unseen(wide)[:, 1] + len(parts))
        ctx.save_for_backward(wide)
        return out, {"samples": samples, "sum": out.sum((1, 2))}

    @staticmethod
    def backward(ctx, gradient, *_):
        (wide,) = ctx.saved_tensors
        return gradient * wide[:, 1], None, None


def padded(block, hidden):
    out, _ = Padding.apply(block.up(hidden), hidden.shape[0], [hidden.shape[0], "parts"])
    return hidden + block.down(ScaleInPlace.apply(out * 1.5).tanh())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(2, 40), min_size=6, max_size=12))
def test_batches_of_any_size(toy_model, toy_batch, sizes):
    """Numbers among a Function's arguments and results are polynomials of the sizes, as for operators."""
    model = toy_model(padded)
    expected = {size: gradients_of(model, toy_batch(size)) for size in sizes}
    with model_with_symbolic_tape(model, toy_batch):
        for size in sizes:
            assert all(map(torch.equal, gradients_of(model, toy_batch(size)), expected[size]))


RECORDED = (24, 8, 31)
"""Sizes that a symbolic tape is fitted to."""


def model_with_symbolic_tape(model, toy_batch):
    """Put the model under a policy that recomputes everything, record RECORDED, and return the handle."""
    policy = uniform_policy(profile_model(model, toy_batch(24), CONFIG), "recompute")
    handle = apply_policy(model, policy, CONFIG)
    for size in RECORDED:
        for _ in range(2):
            gradients_of(model, toy_batch(size))
    return handle


class OtherwiseAt21(Scale):
    """A Function whose replay at one size differs from its call, because it inspects its context."""

    @staticmethod
    def forward(ctx, x, factor=3.0):
        is_replayed = not isinstance(ctx, BackwardCFunction)
        return Scale.forward(ctx, x, factor + (is_replayed and len(x) == 21))


def test_a_size_at_which_it_comes_out_otherwise_is_found(toy_model, toy_batch):
    """A replay that differs at a new size stops the run, before a wrong gradient is used (rule R7)."""
    model = toy_model(through(OtherwiseAt21.apply))
    with model_with_symbolic_tape(model, toy_batch), pytest.raises(TapeMismatchError, match="recomputes saved tensor"):
        gradients_of(model, toy_batch(21))


class Varying(Scale):
    """A Function with a factor from outside."""

    factor = 3.0


class Hiding(Scale):
    """A Function that Dynamo cannot trace, and whose operators contain a number from outside."""

    @staticmethod
    def forward(ctx, x):
        write_unseen(torch.empty_like(x), read_unseen(x))
        ctx.factor = Varying.factor
        return x * Varying.factor


def test_a_number_within_what_a_trace_leaves_out_is_noticed_at_any_call(toy_model, toy_batch):
    model, batch = toy_model(through(Hiding.apply)), toy_batch(24)
    policy = uniform_policy(profile_model(model, batch, CONFIG), "recompute")
    plain = gradients_of(model, batch)
    try:
        with apply_policy(model, policy, CONFIG):
            for _ in range(6):
                assert all(map(torch.equal, gradients_of(model, batch), plain))
            Varying.factor = 5.0
            with pytest.raises(TapeMismatchError, match="recomputes saved tensor"):
                gradients_of(model, batch)
    finally:
        Varying.factor = 3.0
