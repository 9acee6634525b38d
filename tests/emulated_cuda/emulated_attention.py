"""CUDA's fused attention operators on the emulated device, with the same shapes, dtypes and devices of their outputs.

A real kernel keeps no scores, and draws its dropout from a seed and an offset, which backward uses again. These
operators do the same: their temporaries are in host memory and not counted.
"""

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")
_leftovers = count(1)


class _Inputs(NamedTuple):
    """Inputs of forward and backward, in float32 on the host: [batch, head, position, width]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    scale: float


def register() -> None:
    """Register these operators for tensors on CUDA."""
    _library.impl("_scaled_dot_product_flash_attention", _flash, "CUDA")
    _library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CUDA")
    _library.impl("_scaled_dot_product_efficient_attention", _efficient, "CUDA")
    _library.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CUDA")
    _library.impl("_scaled_dot_product_cudnn_attention", _cudnn, "CUDA")
    _library.impl("_scaled_dot_product_cudnn_attention_backward", _cudnn_backward, "CUDA")


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    shapes = _on_meta(_aten._scaled_dot_product_flash_attention, (query, key, value, dropout_p, is_causal), scale)
    state = _drawn(dropout_p, query.shape[0] * query.shape[1])
    out, sums = _forward(_inputs(query, key, value, None, is_causal, scale), dropout_p, state)
    rng_state = torch.tensor(state, dtype=torch.int64).to(torch.uint64)
    unused = torch.zeros((), dtype=torch.uint64)
    debug = torch.zeros(0, dtype=query.dtype)
    placed = (_placed(out, shapes[0]), _placed(sums, shapes[1]), None, None, query.shape[2], key.shape[2])
    return *placed, *map(_given, (rng_state, unused, debug))


def _flash_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad_out, query, key, value, out, logsumexp, _, _, _, _, dropout_p, is_causal, rng_state, _ = arguments
    shapes = _on_meta(_aten._scaled_dot_product_flash_attention_backward, arguments, scale)
    state = tuple(_lent(rng_state).view(torch.int64).tolist())
    inputs = _inputs(query, key, value, None, is_causal, scale)
    gradients = _backward(inputs, grad_out, out, logsumexp, dropout_p, state, key.shape[1])
    return tuple(_placed(*pair) for pair in zip(gradients[:3], shapes, strict=True))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    arguments = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal)
    shapes = _on_meta(_aten._scaled_dot_product_efficient_attention, arguments, scale)
    state = _drawn(dropout_p, query.shape[0] * query.shape[1])
    out, sums = _forward(_inputs(query, key, value, attn_bias, is_causal, scale), dropout_p, state)
    seed, offset = (torch.tensor(one, dtype=torch.int64) for one in state)
    if dropout_p == 0:
        seed, offset = _given(seed), _given(offset)  # with dropout, CUDA returns both on the host
    return _placed(out, shapes[0]), _placed(sums, shapes[1]), seed, offset


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    tensors = (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset)
    arguments = (*tensors, dropout_p, grad_input_mask, is_causal)
    shapes = _on_meta(_aten._scaled_dot_product_efficient_attention_backward, arguments, scale)
    state = (int(_lent(philox_seed)), int(_lent(philox_offset)))
    inputs = _inputs(query, key, value, attn_bias, is_causal, scale)
    gradients = _backward(inputs, grad_out, out, logsumexp, dropout_p, state, key.shape[1])
    return tuple(
        _placed(values, shape) if needs_grad and shape is not None else None
        for values, shape, needs_grad in zip(gradients, shapes, grad_input_mask, strict=True)
    )


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    arguments = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal)
    shapes = _on_meta(_aten._scaled_dot_product_cudnn_attention, arguments, scale)
    state = _drawn(dropout_p, query.shape[0] * query.shape[1])
    out, sums = _forward(_inputs(query, key, value, attn_bias, is_causal, scale), dropout_p, state)
    if dropout_p == 0:
        state = next(_leftovers), next(_leftovers)  # without dropout, the kernel leaves both uninitialized
    seed, offset = (_given(torch.tensor(one, dtype=torch.int64)) for one in state)
    placed = _placed(out, shapes[0]), _placed(sums[..., None], shapes[1])
    return *placed, None, None, query.shape[2], key.shape[2], seed, offset, None


def _cudnn_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad_out, query, key, value, out, logsumexp, seed, offset, attn_bias, *_, dropout_p, is_causal = arguments
    shapes = _on_meta(_aten._scaled_dot_product_cudnn_attention_backward, arguments, scale)
    state = (int(_lent(seed)), int(_lent(offset)))
    inputs = _inputs(query, key, value, attn_bias, is_causal, scale)
    gradients = _backward(inputs, grad_out, out, logsumexp[..., 0], dropout_p, state, key.shape[1])
    return tuple(_placed(*pair) for pair in zip(gradients[:3], shapes, strict=True))


def _inputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> _Inputs:
    query, key, value = (_lent(tensor).float() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + _lent(bias).float()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    return _Inputs(query, key, value, scores, scale)


def _forward(inputs: _Inputs, dropout_p: float, state: tuple[int, int]) -> tuple[Tensor, Tensor]:
    sums = inputs.scores.logsumexp(-1)
    weights = (inputs.scores - sums[..., None]).exp()
    return weights * _dropout_factors(weights, dropout_p, state) @ inputs.value, sums


def _backward(
    inputs: _Inputs,
    grad_out: Tensor,
    out: Tensor,
    sums: Tensor,
    dropout_p: float,
    state: tuple[int, int],
    num_key_heads: int,
) -> tuple[Tensor, ...]:
    grad_out, out, sums = (_lent(tensor).float() for tensor in (grad_out, out, sums))
    weights = (inputs.scores - sums[..., : inputs.query.shape[-2], None]).exp()
    factors = _dropout_factors(weights, dropout_p, state)
    grad_value = (weights * factors).mT @ grad_out
    grad_weights = (grad_out @ inputs.value.mT) * factors
    grad_scores = weights * (grad_weights - (grad_out * out).sum(-1, keepdim=True))
    grad_query = grad_scores @ inputs.key * inputs.scale
    grad_key = grad_scores.mT @ inputs.query * inputs.scale
    by_group = (one.unflatten(1, (num_key_heads, -1)).sum(2) for one in (grad_key, grad_value))
    return grad_query, *by_group, grad_scores


def _drawn(dropout_p: float, num_heads: int) -> tuple[int, int]:
    """Return seed and offset of this call. With dropout, advance the generator's offset by a multiple of four."""
    if dropout_p == 0:
        return 0, 0
    generator = torch.cuda.default_generators[0]
    offset = generator.get_offset()
    generator.set_offset(offset + 32 * num_heads)
    seed = generator.initial_seed()  # an unsigned 64-bit number, which CUDA converts to int64
    return seed - 2**64 if seed >= 2**63 else seed, offset


def _dropout_factors(weights: Tensor, dropout_p: float, state: tuple[int, int]) -> Tensor | float:
    """Return the factor of each weight: 0 for dropped weights, 1 / (1 - dropout_p) for the others."""
    if dropout_p == 0:
        return 1.0
    generator = torch.Generator().manual_seed((state[0] * 0x9E3779B1 + state[1]) % 2**63)
    return (torch.rand(weights.shape, generator=generator) >= dropout_p).float() / (1 - dropout_p)


def _on_meta(operator: Any, arguments: tuple[Any, ...], scale: float | None) -> tuple[Any, ...]:
    """Run the operator on meta, to get torch's shapes, strides and dtypes of the outputs."""
    meta_arguments = [one.to("meta") if isinstance(one, Tensor) else one for one in arguments]
    return operator(*meta_arguments, scale=scale)


def _placed(values: Tensor, like: Tensor) -> Tensor:
    """Copy `values` to the device with the layout of `like`, whose last dimension may be longer, or 0 if unused."""
    result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    width = min(result.shape[-1], values.shape[-1])
    result.fill_(math.inf)[..., :width].copy_(values[..., :width])
    return _given(result)


def _lent(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.lent_to_cpu(tensor)


def _given(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.given_to_device(tensor)
