"""Cross entropy of a linear layer's outputs, chunk by chunk: the logits never exist as a whole.

Each chunk of rows makes its logits, adds to the loss and leaves its share of the gradients, all in forward: so every
product runs once, as in plain training. WarmUpPhase the logits in backward needs as much memory at its peak and one
product in four more.

torch 2.13 has `F.linear_cross_entropy`, which does the same; 2.11 has not. Ours stays until 2.13 is the oldest release
that is supported, and both were compared on a GPU.
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
"""Rows of logits are padded to a multiple of as many columns, which holds nothing: 128 bytes of halves. cuBLAS' kernels
for Hopper load rows that begin at a multiple of 16 bytes, and those of 50257 halves begin at any even one."""
MIN_CHUNK_ROWS = 64
"""Fewer rows make the products slow: the weight's gradient is read and written once per chunk."""

_most_chunks: ContextVar[int | None] = ContextVar("most_chunks", default=None)


@contextmanager
def at_most_chunks(num_chunks: int | None) -> Iterator[None]:
    """While open, no chunk after so many is computed; None computes them all.

    For traces of memory alone: what one chunk makes dies in the next, so the third takes what any later one does.
    """
    token = _most_chunks.set(num_chunks)
    try:
        yield
    finally:
        _most_chunks.reset(token)


def chunk_rows(width: int) -> int:
    """Rows per chunk for a weight of that many columns.

    A chunk's float logits then take half of what the weight's gradient does, which is there in any case.
    """
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
    num_rows: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(rows, weight, bias), target)` with the products in `dtype` and the rest in float32.

    Args:
        rows: [N, D]. target: [N] of class numbers. reduction: "mean" or "sum".
        num_rows: rows per chunk; None takes `chunk_rows`.

    One backward is all that is possible: the gradients are there after forward, and are handed over.
    """
    if num_rows is None:
        num_rows = chunk_rows(rows.shape[-1])
    total = _ChunkedCrossEntropy.apply(rows, weight, bias, target, ignore_index, dtype, num_rows)
    if reduction == "sum":
        return total
    return total / (target != ignore_index).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the losses of all rows that count."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        num_rows: int,
    ) -> Tensor:
        needed = list(ctx.needs_input_grad[:3])
        with torch.autocast(rows.device.type, enabled=False):
            ctx.gradients, total = _forward(rows, weight, bias, target, ignore_index, dtype, num_rows, needed)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ChunkedHeadError(
                "the gradients of a chunked loss were handed over in an earlier backward (retain_graph=True?): set "
                'AdaccConfig(head="plain") to go through one graph twice'
            )
        # In place: a scaled copy of the weight's gradient would be a second one. The list is dropped first, so that
        # autograd may keep these very tensors.
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(gradient) for g in gradients), None, None, None, None)


def _forward(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    num_rows: int,
    needed: list[bool],
) -> tuple[list[Tensor | None], Tensor]:
    """The gradients of rows, weight and bias where `needed`, and the sum of the losses."""
    wide = torch.promote_types(dtype, torch.float32)
    cast_weight = weight.to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    row_gradient = torch.empty_like(rows) if needed[0] else None
    # Sums over chunks are kept wide: in bfloat16 each further chunk would round once more.
    weight_gradient = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    bias_gradient = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    total = torch.zeros((), dtype=wide, device=rows.device)
    for start in range(0, rows.shape[0], num_rows)[: _most_chunks.get()]:
        chunk = slice(start, start + num_rows)
        inputs, labels = rows[chunk].to(dtype), target[chunk]
        counts = (labels != ignore_index).unsqueeze(-1)
        labels = labels.unsqueeze(-1).where(counts, 0)
        outputs = F.log_softmax(_logits(inputs, cast_weight, cast_bias), -1, dtype=wide)
        total -= outputs.gather(-1, labels).where(counts, 0).sum()
        if not any(needed):
            continue
        # Softmax less one at the label: the gradient of the logits, but for rows that do not count. Theirs is 0, which
        # the narrow factors of the products below say as well, in a fraction of the time.
        outputs.exp_().scatter_add_(-1, labels, counts.to(wide).neg_())
        if bias_gradient is not None:
            bias_gradient += outputs.mul_(counts)[:, : len(bias_gradient)].sum(0)
        outputs = outputs.to(dtype)[:, : len(cast_weight)]
        if row_gradient is not None:
            row_gradient[chunk] = (outputs @ cast_weight).mul_(counts)
        if weight_gradient is not None:
            _add_product(weight_gradient, outputs, inputs * counts)
        del outputs
    gradients = [row_gradient]
    for gradient, tensor in ((weight_gradient, weight), (bias_gradient, bias)):
        gradients.append(None if gradient is None or tensor is None else gradient.to(tensor.dtype))
    return gradients, total


def _logits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear layer's outputs, with columns of -inf after them where rows would not be aligned.

    Softmax is 0 there and no sum changes. Fewer classes than COLUMNS stay as they are: most of a row would be padding.
    """
    classes = weight.shape[0]
    missing = -classes % COLUMNS
    if not missing or classes < COLUMNS or not all(is_plain(tensor) or is_fake(tensor) for tensor in (inputs, weight)):
        return F.linear(inputs, weight, bias)
    padded = inputs.new_empty(inputs.shape[0], classes + missing)
    padded[:, classes:] = -torch.inf
    if bias is None:
        torch.mm(inputs, weight.T, out=padded[:, :classes])
    else:
        torch.addmm(bias, inputs, weight.T, out=padded[:, :classes])
    return padded


def _add_product(total: Tensor, outputs: Tensor, inputs: Tensor) -> None:
    """Add `outputs.T @ inputs` to `total`: on a GPU within the product, which reads and writes the sum once."""
    if total.dtype == outputs.dtype:
        total.addmm_(outputs.T, inputs)
    elif (is_plain(total) or is_fake(total)) and adds_into_wider(total.device, outputs.dtype, is_fake(total)):
        torch.addmm(total, outputs.T, inputs, out_dtype=total.dtype, out=total)
    else:
        total += outputs.T @ inputs
