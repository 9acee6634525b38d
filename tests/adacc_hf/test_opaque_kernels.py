"""Blocks whose kernels write by address: their users need no more memory than under gradient checkpointing.

The kernels resemble those of FLA (gated linear attention in chunks) and of fused LoRA (rotations in place, quantized
weights, a backward that writes into its saved tensors). They are written in numpy, on the tensors' memory.

`pytest -s tests/adacc_hf/test_opaque_kernels.py` prints the peaks.
"""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import measure_step

WIDTH, HEADS, CHUNK = 64, 4, 16


def memory_of(tensor):
    assert tensor.is_contiguous()
    kind = {torch.float32: ctypes.c_float, torch.int8: ctypes.c_int8}[tensor.dtype]
    return np.ctypeslib.as_array((kind * tensor.numel()).from_address(tensor.data_ptr())).reshape(tuple(tensor.shape))


class FusedNorm(Function):
    """RMSNorm that saves its input and the reciprocal of each row's deviation."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        memory_of(scale)[...] = 1 / np.sqrt((memory_of(x) ** 2).mean(-1) + np.float32(eps))
        memory_of(out)[...] = memory_of(x) * memory_of(scale)[..., None] * memory_of(weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale[..., None]
        weighted = gradient * weight
        inner = (weighted * normed).mean(-1, keepdim=True)
        return (scale[..., None] * (weighted - normed * inner), (gradient * normed).flatten(0, -2).sum(0), None)


class FusedGate(Function):
    """silu(a) * b, whose backward writes both gradients over a and b, as in Liger and Unsloth."""

    @staticmethod
    def forward(a, b):
        out = torch.empty_like(a)
        gate(memory_of(a), memory_of(b), memory_of(out))
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        gate_backward(memory_of(gradient.contiguous()), memory_of(a), memory_of(b))
        return a, b


def gate(a, b, out):
    out[...] = a / (1 + np.exp(-a)) * b


def gate_backward(gradient, a, b):
    sigmoid = 1 / (1 + np.exp(-a))
    for_a = gradient * b * sigmoid * (1 + a * (1 - sigmoid))
    b[...] = gradient * a * sigmoid
    a[...] = for_a


class ChunkedAttention(Function):
    """Gated linear attention by chunks, which saves the sums of the gates and returns a state that may be None."""

    @staticmethod
    def forward(ctx, q, k, v, g, scale, wants_state):
        sums, scores = torch.empty_like(g), q.new_empty(*q.shape[:2], q.shape[2] // CHUNK, CHUNK, CHUNK)
        state = q.new_empty(*q.shape[:2], q.shape[3], v.shape[3])
        out = torch.empty_like(v)
        chunks(q, k, v, g, scale, sums, scores, state, out)
        ctx.save_for_backward(q, k, v, g, sums, scores)
        ctx.scale = scale
        return out, state if wants_state else None

    @staticmethod
    def backward(ctx, gradient, _):
        q, k, v, g, sums, scores = ctx.saved_tensors
        parts = [part.unflatten(2, (-1, CHUNK)) for part in (q, k, v, gradient)]
        q, k, v, gradient = parts
        for_scores = (gradient @ v.transpose(-1, -2)).tril_() * ctx.scale
        grads = [for_scores @ k, for_scores.transpose(-1, -2) @ q, scores.tril().transpose(-1, -2) @ gradient]
        for_q, for_k, for_v = [grad.flatten(2, 3) for grad in grads]
        return for_q, for_k, for_v, (sums * g).sum(-1, keepdim=True) * gradient.mean(), None, None


def chunks(q, k, v, g, scale, sums, scores, state, out):
    q, k, v, g, sums, scores, state, out = map(memory_of, (q, k, v, g, sums, scores, state, out))
    sums[...] = np.cumsum(g, axis=2)
    state[...] = 0
    for index in range(q.shape[2] // CHUNK):
        part = slice(index * CHUNK, (index + 1) * CHUNK)
        decay = np.exp(-np.abs(sums[:, :, part]))
        scores[:, :, index] = np.tril(q[:, :, part] @ k[:, :, part].swapaxes(-1, -2)) * np.float32(scale)
        out[:, :, part] = scores[:, :, index] @ v[:, :, part] + (q[:, :, part] @ state) * decay
        state += k[:, :, part].swapaxes(-1, -2) @ v[:, :, part]


class LinearAttentionBlock(nn.Module):
    """A block in the style of FLA."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.out_norm = nn.Parameter(torch.ones(WIDTH // HEADS))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.g = nn.Linear(WIDTH, HEADS)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        x = FusedNorm.apply(hidden, self.norm, 1e-6)
        q, k, v = (split(part(x)).contiguous() for part in (self.q, self.k, self.v))
        g = F.logsigmoid(self.g(x)).transpose(1, 2)[..., None].contiguous()
        out, _ = ChunkedAttention.apply(q, k, v, g, (WIDTH // HEADS) ** -0.5, False)
        out = FusedNorm.apply(out.transpose(1, 2).contiguous(), self.out_norm, 1e-6)
        hidden = hidden + self.o(out.flatten(2))
        x = FusedNorm.apply(hidden, self.mlp_norm, 1e-6)
        return hidden + self.down(FusedGate.apply(self.gate(x), self.up(x)))


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Rotate(Function):
    """Rotary positions, written in place into a tensor of the block. The tables are attributes of the context."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        rotate(memory_of(x), memory_of(cos), memory_of(sin))
        ctx.cos, ctx.sin = cos, sin
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        rotate(memory_of(gradient), memory_of(ctx.cos), -memory_of(ctx.sin))
        return gradient, None, None


def rotate(x, cos, sin):
    left, right = np.split(x, 2, axis=-1)
    x[...] = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Quantized:
    """The scale and the original shape of a quantized weight."""

    def __init__(self, scale, shape):
        self.scale, self.shape, self.kind = scale, shape, "int8"


def dequantized(weight, state):
    out = torch.empty(state.shape, dtype=state.scale.dtype)
    memory_of(out)[...] = memory_of(weight).reshape(tuple(state.shape)) * memory_of(state.scale)
    return out


def product(x, weight, state, a, b, scale):
    return x @ dequantized(weight, state).t() + (x @ a.t()) @ b.t() * scale


def product_backward(gradient, x, weight, state, a, b, scale):
    rows, of = x.flatten(0, -2), gradient.flatten(0, -2) * scale
    for_x = gradient @ dequantized(weight, state) + (of @ b @ a).view(x.shape)
    return for_x, (of @ b).t() @ rows, of.t() @ (rows @ a.t())


class FusedLoRA(Function):
    """Products with quantized weights and their adapters, each passed as (weight, state, a, b, scale)."""

    @staticmethod
    def forward(ctx, x, scale, *parts):
        groups = [parts[i : i + 4] for i in range(0, len(parts), 4)]
        ctx.frozen = [(weight, state) for weight, state, _, _ in groups]
        ctx.save_for_backward(x, *[adapter for _, _, a, b in groups for adapter in (a, b)])
        ctx.scale = scale
        return tuple(product(x, *group, scale) for group in groups)

    @staticmethod
    def backward(ctx, *gradients):
        x, *adapters = ctx.saved_tensors
        for_x, input_gradients = torch.zeros_like(x), []
        for index, (gradient, frozen) in enumerate(zip(gradients, ctx.frozen, strict=True)):
            of_x, of_a, of_b = product_backward(gradient, x, *frozen, *adapters[2 * index : 2 * index + 2], ctx.scale)
            for_x += of_x
            input_gradients += [None, None, of_a, of_b]
        return for_x, None, *input_gradients


class FusedMlp(Function):
    """A gated MLP with LoRA whose backward overwrites its saved tensors. An argument selects the kernels."""

    @staticmethod
    def forward(ctx, x, scale, kernel, kernel_backward, *parts):
        gates, ups, downs = parts[:4], parts[4:8], parts[8:]
        e, g = product(x, *gates, scale), product(x, *ups, scale)
        h = torch.empty_like(e)
        kernel(memory_of(e), memory_of(g), memory_of(h))
        ctx.frozen = [group[:2] for group in (gates, ups, downs)]
        ctx.save_for_backward(x, e, g, *[adapter for group in (gates, ups, downs) for adapter in group[2:]])
        ctx.scale, ctx.kernel, ctx.kernel_backward = scale, kernel, kernel_backward
        return product(h, *downs, scale)

    @staticmethod
    def backward(ctx, gradient):
        x, e, g, *adapters = ctx.saved_tensors
        h = torch.empty_like(e)
        ctx.kernel(memory_of(e), memory_of(g), memory_of(h))
        for_h, *downs = product_backward(gradient, h, *ctx.frozen[2], *adapters[4:], ctx.scale)
        ctx.kernel_backward(memory_of(for_h.contiguous()), memory_of(e), memory_of(g))
        for_x, *gates = product_backward(e, x, *ctx.frozen[0], *adapters[:2], ctx.scale)
        more, *ups = product_backward(g, x, *ctx.frozen[1], *adapters[2:4], ctx.scale)
        return for_x + more, None, None, None, None, None, *gates, None, None, *ups, None, None, *downs


class Adapted(nn.Module):
    """A frozen weight in int8 and its adapter."""

    def __init__(self, width, out, rank=4):
        super().__init__()
        content = torch.randint(-100, 100, (out * width,), dtype=torch.int8)
        self.weight = nn.Parameter(content, requires_grad=False)
        self.weight.state = Quantized(torch.full((out, 1), 0.01 / width**0.5), torch.Size((out, width)))
        self.a, self.b = nn.Parameter(torch.randn(rank, width) * 0.1), nn.Parameter(torch.randn(out, rank) * 0.1)

    @property
    def parts(self):
        return self.weight, self.weight.state, self.a, self.b


class LoRABlock(nn.Module):
    """A block in the style of Unsloth."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = (nn.Parameter(torch.ones(WIDTH), requires_grad=False) for _ in range(2))
        self.q, self.k, self.v, self.o = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, 3 * WIDTH), Adapted(3 * WIDTH, WIDTH)

    def forward(self, hidden, cos, sin):
        x = FusedNorm.apply(hidden, self.norm, 1e-6)
        q, k, v = FusedLoRA.apply(x, 2.0, *self.q.parts, *self.k.parts, *self.v.parts)
        q, k = (Rotate.apply(part.unflatten(-1, (HEADS, -1)), cos, sin).transpose(1, 2) for part in (q, k))
        out = F.scaled_dot_product_attention(q, k, split(v), is_causal=True)
        (out,) = FusedLoRA.apply(out.transpose(1, 2).flatten(2), 2.0, *self.o.parts)
        hidden = hidden + out
        x = FusedNorm.apply(hidden, self.mlp_norm, 1e-6)
        return hidden + FusedMlp.apply(x, 2.0, gate, gate_backward, *self.gate.parts, *self.up.parts, *self.down.parts)


class Model(nn.Module):
    def __init__(self, block, num_blocks=6):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(num_blocks))
        self.is_checkpointed = False

    def forward(self, x):
        hidden, tables = self.inlet(x), ()
        if isinstance(self.layers[0], LoRABlock):
            angles = torch.arange(x.shape[1])[:, None] * torch.logspace(0, -2, WIDTH // HEADS // 2)
            tables = (angles.cos()[:, None].contiguous(), angles.sin()[:, None].contiguous())
        for layer in self.layers:
            if self.is_checkpointed:
                hidden = checkpoint(layer, hidden, *tables, use_reentrant=False)
            else:
                hidden = layer(hidden, *tables)
        return SimpleNamespace(loss=hidden.square().mean())


BLOCKS = [LinearAttentionBlock, LoRABlock]
CONFIG = AdaccConfig(block_classes=tuple(block.__name__ for block in BLOCKS), min_compress_bytes=0)
LOSSLESS = AdaccConfig(block_classes=CONFIG.block_classes, actions=("retain", "recompute"))


def gradients_of(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def peak_of(model, batch):
    gradients_of(model, batch)
    model.zero_grad(set_to_none=True)
    memory = measure_step(model, batch)
    return memory.peak_bytes - memory.static_bytes


@pytest.mark.parametrize("block", BLOCKS)
def test_the_least_peak_is_no_higher_than_checkpointings(one_thread, block):
    """Gradients equal plain training's, and the step needs no more memory than torch's checkpoint, the model
    excluded."""
    model = Model(block).train()
    batch = {"x": torch.randn(4, 64, WIDTH)}
    exact, plain = gradients_of(model, batch), peak_of(model, batch)
    model.is_checkpointed = True
    assert all(map(torch.equal, gradients_of(model, batch), exact))
    checkpointing = peak_of(model, batch)
    model.is_checkpointed = False
    profile = profile_model(model, batch, CONFIG)
    (kind,) = profile.kinds
    assert kind.untrusted is None
    assert all(value.recomputable for value in kind.activations if value.producer is not None)
    policy = least_policy(profile, LOSSLESS)
    with apply_policy(model, policy, CONFIG):
        for _ in range(3):
            assert all(map(torch.equal, gradients_of(model, batch), exact))
        ours = peak_of(model, batch)
    print(f"\n{block.__name__}: plain {plain:,}, torch's checkpoint {checkpointing:,}, least {ours:,} bytes of a step")
    print(f"{ours / checkpointing:.3f} of torch's checkpoint")
    assert ours <= checkpointing
