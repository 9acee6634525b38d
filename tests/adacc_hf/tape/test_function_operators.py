"""An `autograd.Function` whose kernels write by address is one operator of a tape (rules R5, R6, R7)."""

import ctypes
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.tape.function_operators import FunctionTarget, Surroundings
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)
_WORDS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.float16}


def memory_of(tensor):
    """The elements of a dense tensor as an array at its address: no dispatcher and no version counter sees it."""
    word = np.dtype(_WORDS[tensor.dtype])
    content = (ctypes.c_char * (tensor.numel() * word.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(content, word).reshape(tuple(tensor.shape))


def read_unseen(tensor):
    words = memory_of(tensor)
    if tensor.dtype is torch.bfloat16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float64 if tensor.dtype is torch.float64 else np.float32)


def write_unseen(tensor, values):
    words = np.ascontiguousarray(values)
    if tensor.dtype is torch.bfloat16:
        words = (words.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    memory_of(tensor)[...] = words


@dataclass(frozen=True)
class Shape:
    """The ways in which the Functions of the property test differ."""

    has_setup: bool
    dtype: torch.dtype
    saved: tuple[str, ...]
    result: str
    draws: bool
    uses_operators: bool
    weights: str
    materializes: bool
    autocast: bool
    samples: int
    attributes: dict = field(default_factory=dict, hash=False)


def make_function(shape):
    """A Function of that shape. Its backward is no derivative; it depends on every bit that was saved."""

    def compute(x, weights, scale):
        weight = weights if isinstance(weights, torch.Tensor) else weights.w if shape.weights == "object" else weights[0]
        inner, out = torch.empty_like(x), torch.empty(x.shape, dtype=x.dtype)
        write_unseen(inner, read_unseen(x) * scale)
        if shape.draws:
            noise = torch.rand(x.shape)
            write_unseen(inner, read_unseen(inner) * (read_unseen(noise) > 0.5))
        write_unseen(out, np.tanh(read_unseen(inner)) * read_unseen(weight.contiguous()))
        if shape.uses_operators:
            inner = (inner * 2).sigmoid()
        return {"x": x, "weight": weight, "inner": inner, "out": out}

    def result_of(made):
        out = made["out"]
        return {
            "tensor": out,
            "pair": (out, made["inner"] if "inner" in shape.saved else out.clone()),
            "with number": (out, out.shape[0]),
            "with none": (None, out, "text"),
        }[shape.result]

    def save(ctx, made):
        ctx.save_for_backward(*[None if name == "none" else made[name] for name in shape.saved])
        ctx.set_materialize_grads(shape.materializes)
        ctx.scale = 0.5
        if shape.result == "pair":
            ctx.mark_non_differentiable(result_of(made)[1])

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
            made = compute(x, weights, scale)
            save(ctx, made)
            return result_of(made)

    class New(torch.autograd.Function):
        @staticmethod
        def forward(x, weights, scale=1.5):
            return result_of(compute(x, weights, scale))

        @staticmethod
        def setup_context(ctx, inputs, output):
            out = output if isinstance(output, torch.Tensor) else next(t for t in output if isinstance(t, torch.Tensor))
            save(ctx, {"x": inputs[0], "weight": inputs[1], "inner": out, "out": out, "none": None})

    made = New if shape.has_setup else Old
    made.backward = staticmethod(backward)
    return made


@st.composite
def shapes(draw):
    has_setup = draw(st.booleans())
    names = ["x", "out", "none"] if has_setup else ["x", "inner", "out", "none"]
    weights = draw(st.sampled_from(["tensor"] if has_setup else ["tensor", "list", "object"]))
    return Shape(
        has_setup=has_setup,
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        saved=tuple(draw(st.lists(st.sampled_from(names), max_size=4))),
        result=draw(st.sampled_from(["tensor", "with number", "with none"] if has_setup else RESULTS)),
        draws=draw(st.booleans()),
        uses_operators=draw(st.booleans()),
        weights=weights,
        materializes=draw(st.booleans()),
        autocast=draw(st.booleans()),
        samples=draw(st.integers(2, 4)),
    )


RESULTS = ["tensor", "pair", "with number", "with none"]


class Weights:
    def __init__(self, w):
        self.w, self.name = w, "weights"


def first_tensor(result):
    return result if isinstance(result, torch.Tensor) else next(t for t in result if isinstance(t, torch.Tensor))


def forward_with(function, shape):
    def forward(block, hidden):
        x = block.up(hidden).to(shape.dtype).contiguous()
        weight = block.down.weight[0].to(shape.dtype)
        weights = {"tensor": weight, "list": [weight.detach()], "object": Weights(weight.detach())}[shape.weights]
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
    assert kind.fallback is None
    assert [operator.name for operator in kind.operators].count(str(FunctionTarget(function))) == 1
    assert all(value.recomputable for value in kind.activations if value.producer is not None and not value.is_index)
