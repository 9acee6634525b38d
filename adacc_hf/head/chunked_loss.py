"""Cross entropy of a linear layer's outputs in chunks of rows, without the full logits in memory.

For each chunk, forward computes the logits, the loss and the gradients. So each of the three matrix products runs once,
as in plain training. Recomputing the logits in backward would need the same peak memory, and a fourth product.

torch 2.13 has `F.linear_cross_entropy`, which does the same, but torch 2.11 does not have this function. This
implementation stays until 2.13 is the oldest supported release and both implementations were compared on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.torch_glue.compat import adds_into_wider
from adacc_hf.torch_glue.tensors import is_fake, is_plain

COLUMNS = 64
"""Unit of padding: the logits are padded to a multiple of this number of columns, which is 128 bytes in half precision.

cuBLAS' kernels for Hopper need rows that start at multiples of 16 bytes. Rows of 50257 half-precision numbers, for
example, would start at any even address.
"""
MIN_CHUNK_ROWS = 64
"""Minimum number of rows per chunk. With fewer rows the matrix products are slow, because each chunk reads and writes
the weight's gradient once."""

_most_chunks: ContextVar[int | None] = ContextVar("most_chunks", default=None)


@contextmanager
def at_most_chunks(num_chunks: int | None) -> Iterator[None]:
    """Compute only the first `num_chunks` chunks of each chunked loss inside the `with` block, or all for None, to
    measure memory: all chunks from the third on use the same."""
    token = _most_chunks.set(num_chunks)
    try:
        yield
    finally:
        _most_chunks.reset(token)


def chunk_rows(width: int) -> int:
    """Return the number of rows of logits per chunk, for an output layer whose weight has `width` columns. A chunk's
    float logits then take half the memory of the weight's gradient, which is always needed."""
    return max(MIN_CHUNK_ROWS, width // 2)


def chunked_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    dtype: torch.dtype,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return `F.cross_entropy(F.linear(rows, weight, bias), target)`, computed in chunks of rows.

    Args:
        rows: [N, D], the input of the output layer.
        target: [N], class indices.
        dtype: dtype of the matrix products. Everything else is computed in float32, or in `dtype` if `dtype` is wider.
        ignore_index: class index of the rows that the loss ignores.
        reduction: "mean" or "sum".

    Only one backward is possible, because backward passes the gradients computed in forward to autograd without a copy.
    """
    total = _ChunkedCrossEntropy.apply(rows, weight, bias, target, ignore_index, dtype)
    if reduction == "sum":
        return total
    return total / (target != ignore_index).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Autograd function of the chunked loss: the sum of the losses of all rows whose label is not `ignore_index`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> Tensor:
        needed = list(ctx.needs_input_grad[:3])
        with torch.autocast(rows.device.type, enabled=False):
            ctx.gradients, total = _forward_in_chunks(rows, weight, bias, target, ignore_index, dtype, needed)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ChunkedHeadError(
                "the gradients of a chunked loss were freed by an earlier backward (retain_graph=True?): set "
                'AdaccConfig(head="plain") to run backward twice through one graph'
            )
        # Scale in place, because a scaled copy of the weight's gradient would take the memory twice. Drop the list
        # first, so that autograd can use these tensors as gradients without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(gradient) for g in gradients), None, None, None)


def _forward_in_chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    needed: list[bool],
) -> tuple[list[Tensor | None], Tensor]:
    """Compute the loss in chunks of rows. Return (gradients of rows, weight and bias, sum of the losses). A gradient is
    None where its flag in `needed` is False."""
    wide = torch.promote_types(dtype, torch.float32)
    cast_weight = weight.to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    row_gradient = torch.empty_like(rows) if needed[0] else None
    # Sums over chunks are in float32, because in bfloat16 each chunk would add a rounding error.
    weight_gradient = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    bias_gradient = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    total = torch.zeros((), dtype=wide, device=rows.device)
    num_rows = chunk_rows(rows.shape[-1])
    for start in range(0, rows.shape[0], num_rows)[: _most_chunks.get()]:
        chunk = slice(start, start + num_rows)
        inputs, labels = rows[chunk].to(dtype), target[chunk]
        is_counted = (labels != ignore_index).unsqueeze(-1)
        labels = labels.unsqueeze(-1).where(is_counted, 0)
        outputs = F.log_softmax(_chunk_logits(inputs, cast_weight, cast_bias), -1, dtype=wide)
        total -= outputs.gather(-1, labels).where(is_counted, 0).sum()
        if not any(needed):
            continue
        # The gradient of the logits is softmax, minus one at the label, and 0 for ignored rows. Setting these rows to 0
        # in the narrow factors of the products below takes a fraction of the time.
        outputs.exp_().scatter_add_(-1, labels, is_counted.to(wide).neg_())
        if bias_gradient is not None:
            bias_gradient += outputs.mul_(is_counted)[:, : len(bias_gradient)].sum(0)
        outputs = outputs.to(dtype)[:, : len(cast_weight)]
        if row_gradient is not None:
            row_gradient[chunk] = (outputs @ cast_weight).mul_(is_counted)
        if weight_gradient is not None:
            _add_product(weight_gradient, outputs, inputs * is_counted)
        del outputs
    gradients = [row_gradient]
    for gradient, tensor in ((weight_gradient, weight), (bias_gradient, bias)):
        gradients.append(None if gradient is None or tensor is None else gradient.to(tensor.dtype))
    return gradients, total


def _chunk_logits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits of one chunk, padded with columns of -inf if rows would not be aligned in memory. The softmax
    of the padding is 0, so no sum changes. With fewer than COLUMNS classes, the logits are not padded, because most of
    a row would be padding."""
    classes = weight.shape[0]
    num_padding = -classes % COLUMNS
    is_supported = all(is_plain(tensor) or is_fake(tensor) for tensor in (inputs, weight))
    if not num_padding or classes < COLUMNS or not is_supported:
        return F.linear(inputs, weight, bias)
    padded = inputs.new_empty(inputs.shape[0], classes + num_padding)
    padded[:, classes:] = -torch.inf
    if bias is None:
        torch.mm(inputs, weight.T, out=padded[:, :classes])
    else:
        torch.addmm(bias, inputs, weight.T, out=padded[:, :classes])
    return padded


def _add_product(total: Tensor, outputs: Tensor, inputs: Tensor) -> None:
    """Add `outputs.T @ inputs` to `total` in place."""
    if total.dtype == outputs.dtype:
        total.addmm_(outputs.T, inputs)
    elif (is_plain(total) or is_fake(total)) and adds_into_wider(total.device, outputs.dtype, is_fake(total)):
        torch.addmm(total, outputs.T, inputs, out_dtype=total.dtype, out=total)
    else:
        total += outputs.T @ inputs
