"""Behaviours of earlier versions of torch and Transformers, for predictions of runs that were measured with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers.loss import loss_utils


class _SoftmaxWithInput(torch.autograd.Function):
    """Softmax that saves its input for backward, in addition to its output."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        probabilities = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, probabilities)
        ctx.dim = dim
        return probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _, probabilities = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], probabilities, ctx.dim, probabilities.dtype), None


def _softmax_before_1_11(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    # Autocast runs softmax in float32, on a copy of the input. The copy is saved.
    is_autocast = torch.is_autocast_enabled(scores.device.type)
    return _SoftmaxWithInput.apply(scores.to(torch.float32 if is_autocast else dtype or scores.dtype), dim)


def _loss_before_4_50(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, ignore_index: int = -100, **_: Any
) -> torch.Tensor:
    logits = logits.float()
    shifted_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return functional.cross_entropy(shifted_logits, labels[..., 1:].contiguous().view(-1), ignore_index=ignore_index)


OLDER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "softmax keeps its input": lambda: patch.object(functional, "softmax", _softmax_before_1_11),
    "the loss copies the shifted logits": lambda: patch.dict(
        loss_utils.LOSS_MAPPING, {"ForCausalLM": _loss_before_4_50}
    ),
}
"""Patches by the behaviour that they restore: the behaviour of torch before 1.11 (March 2022), and of Transformers
before 4.50 (March 2025)."""


@contextmanager
def older_behaviours(behaviours: Sequence[str]) -> Iterator[None]:
    """While open, give torch and Transformers these `behaviours` of earlier versions."""
    with ExitStack() as stack:
        for name in behaviours:
            stack.enter_context(OLDER[name]())
        yield
