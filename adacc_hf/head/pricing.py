"""What a model's output layer and loss cost with whole logits and chunked, measured on one batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.profiling.timing import median_ms

REPEATS = 1
"""Timed runs of each, after one to warm up: a head is long beside the clock's noise, and as long as some blocks."""


def head_ms(loss: LossCall, compute: Callable[[LossCall], Tensor]) -> float:
    """Milliseconds of forward and backward of one loss, made by `compute`."""
    return median_ms(lambda: _gradients(loss, compute), loss.rows.device, REPEATS)


def _gradients(loss: LossCall, compute: Callable[[LossCall], Tensor]) -> tuple[Tensor, ...]:
    """The gradients that training needs of the layer, from copies that end where the layer starts."""
    tensors = (loss.rows, loss.call.weight, loss.call.bias)
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.enable_grad():
        value = compute(loss.on(*leaves))
    return torch.autograd.grad(value, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad])


def whole(loss: LossCall) -> Tensor:
    """The loss by way of whole logits."""
    dtype, bias = loss.call.dtype, loss.call.bias
    with torch.autocast(loss.rows.device.type, enabled=False):
        logits = F.linear(loss.rows.to(dtype), loss.call.weight.to(dtype), None if bias is None else bias.to(dtype))
        return F.cross_entropy(logits.float(), loss.target, ignore_index=loss.ignore_index, reduction=loss.reduction)


HEADS = {"plain": whole, "chunked": LossCall.chunked}
"""How each head makes a loss, by its name."""
