"""Stand-ins for the kernels of Liger 0.8, with which a fake model's memory is traced (`adacc plan --liger`).

Triton's kernels do not run on fake tensors. Each stand-in allocates, saves and overwrites the tensors that Liger's
`autograd.Function` of the same name does, by operators of torch whose values have no meaning. Source:
https://github.com/linkedin/Liger-Kernel.

The defaults of `use_liger_kernel=True` are planned: RMSNorm, rotary embeddings, SwiGLU, and the fused linear cross
entropy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from adacc_hf.estimate.model_presets import is_classifier

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` of the models that are planned."""
_NUM_PROGRAMS = {"cuda": 132, "cpu": 1}
"""Rows of partial gradients of a norm's weight, by device type: one per multiprocessor (an H100 has 132)."""
_IGNORED_LABEL = -100


class _RmsNorm(torch.autograd.Function):
    """Norm that saves its input and the rows' float32 factors. Backward writes over the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        rows = states.contiguous().view(-1, states.shape[-1])
        result = rows * weight.to(rows.dtype)
        factors = rows[:, :1].to(torch.float32, copy=True)
        ctx.save_for_backward(rows, weight, factors)
        return result.view(states.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        partial_sums = None
        if ctx.needs_input_grad[1]:
            partial_sums = weight.new_empty((_NUM_PROGRAMS[weight.device.type], len(weight)), dtype=torch.float32)
        gradient.view(rows.shape).mul_(rows)
        sums = None if partial_sums is None else partial_sums.sum(dim=0).to(weight.dtype)
        return gradient, sums


class _SiluProduct(torch.autograd.Function):
    """silu(gate) * up, which saves both factors. Backward writes the gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        return gate.mul_(gradient), up.mul_(gradient)


class _Rotation(torch.autograd.Function):
    """Rotary embeddings, written over queries and keys. Backward writes over their gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos), _rotated(key, cos)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> Any:
        cos, _ = ctx.saved_tensors
        return _rotated(query, cos), _rotated(key, cos), None, None


def _rotated(states: Tensor, factors: Tensor) -> Tensor:
    """Write over `states` [batch, heads, tokens, size], or over a copy if the tokens' heads are not contiguous."""
    return states.transpose(1, 2).contiguous().mul_(factors.unsqueeze(2)).transpose(1, 2)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Loss of the output layer in chunks of rows. Forward computes the gradients of the rows and of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        num_rows, size = rows.shape
        chunk_rows = min(num_rows, _next_power_of_2(-(-num_rows // -(-weight.shape[0] // size))))
        row_gradient = torch.zeros_like(rows)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = torch.zeros(num_rows, dtype=torch.float32, device=rows.device)
        is_counted = target != _IGNORED_LABEL
        is_reused = _writes_products(rows, weight)
        logits_buffer = rows.new_empty((chunk_rows, weight.shape[0])) if is_reused else None
        for start in range(0, num_rows, chunk_rows):
            chunk = rows[start : start + chunk_rows]
            if logits_buffer is not None:
                logits = logits_buffer[: len(chunk)]
                torch.mm(chunk, weight.t(), out=logits)
            else:
                logits = chunk @ weight.t()
            logits.neg_()  # the kernel writes the gradient over the logits
            chunk_gradient = row_gradient[start : start + chunk_rows]
            if is_reused and logits.dtype == rows.dtype:
                torch.mm(logits, weight, out=chunk_gradient)
            else:
                chunk_gradient.copy_(logits @ weight)
            if weight_gradient is not None:
                _add_product(weight_gradient, logits, chunk)
            del logits, chunk
        del logits_buffer, is_counted
        ctx.save_for_backward(row_gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        row_gradient, weight_gradient = ctx.saved_tensors
        return row_gradient, weight_gradient, None


def _writes_products(rows: Tensor, weight: Tensor) -> bool:
    """Return True if Liger writes products into buffers: on a GPU, if autocast would not cast their factors."""
    if rows.device.type != "cuda" or rows.dtype != weight.dtype:
        return False
    return not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") == rows.dtype


def _add_product(total: Tensor, logits: Tensor, chunk: Tensor) -> None:
    """Add the product of a chunk to the gradient of the weight, in the way that Liger chooses."""
    if total.device.type == "cuda" and logits.dtype in (torch.float16, torch.bfloat16):
        factor = chunk.to(logits.dtype)
        if total.dtype == logits.dtype:
            total.addmm_(logits.t(), factor)
            return
        if total.dtype == torch.float32:
            # Liger adds in float32 without a temporary, by an operator that fake tensors do not have.
            torch.mm(logits.t(), factor, out=total.view(factor.dtype)[:, : factor.shape[1]])
            return
    total += torch.mm(logits.t(), chunk).float()


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def check_family(config: PretrainedConfig) -> None:
    """Raise ValueError if Liger's kernels are not planned for the model of `config`."""
    if config.model_type not in FAMILIES or is_classifier(config):
        kind = f"classifiers of {config.model_type}" if config.model_type in FAMILIES else config.model_type
        raise ValueError(
            f"--liger is planned for language models of the types {', '.join(FAMILIES)}, and not for {kind}: leave out "
            f"--liger for an upper bound of the peak, or pass a measured --profile"
        )


def use_kernels(model: PreTrainedModel) -> None:
    """Replace the norms, MLPs and loss of `model` by stand-ins for Liger's default kernels.

    The stand-in for rotary embeddings is installed by `rotary_kernels`.
    """
    layers = model.model.layers
    norms = [model.model.norm]
    for layer in layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(layer.self_attn, name, None)) is not None]
        layer.mlp.__dict__["forward"] = partial(_mlp_forward, layer.mlp)
    for norm in norms:
        norm.__dict__["forward"] = partial(_norm_forward, norm)
    model.__dict__["forward"] = partial(_model_forward, model)


@contextmanager
def rotary_kernels(config: PretrainedConfig) -> Iterator[None]:
    """Replace the function for rotary embeddings in Transformers' module of `config.model_type` by a stand-in for
    Liger's kernel, inside the `with` block."""
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    rotate = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = lambda *args, **kwargs: _Rotation.apply(*args[:4])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]


def _norm_forward(norm: Any, states: Tensor) -> Tensor:
    return _RmsNorm.apply(states, norm.weight)


def _mlp_forward(mlp: Any, states: Tensor) -> Tensor:
    return mlp.down_proj(_SiluProduct.apply(mlp.gate_proj(states), mlp.up_proj(states)))


def _model_forward(model: Any, *, labels: Tensor, **inputs: Any) -> CausalLMOutputWithPast:
    states = model.model(**inputs).last_hidden_state
    padded = nn.functional.pad(labels, (0, 1), value=_IGNORED_LABEL)  # alive until the loss is computed
    target = padded[..., 1:].contiguous().view(-1)
    loss = _FusedLinearCrossEntropy.apply(states.view(-1, states.shape[-1]), model.lm_head.weight, target)
    return CausalLMOutputWithPast(loss=loss)
