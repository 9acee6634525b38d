"""A model called for a loss that somebody else makes of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

ComputeLoss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
"""Calls the model on a batch, which it may change, and returns the loss to train on."""


class WithLoss(nn.Module):
    """`model` as its callers see it whose output has a `loss`: the one that `compute_loss(model, batch)` returns."""

    def __init__(self, model: nn.Module, compute_loss: ComputeLoss) -> None:
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss

    def forward(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=self._compute_loss(self.model, batch))
