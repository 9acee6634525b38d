"""Profiling of a model's heads (full or chunked logits), and of models whose forward does not return a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.head import ChunkedHead
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.price.measurement import Measurement

log = logging.getLogger(__name__)

T = TypeVar("T")

ComputeLoss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
"""Function of (model, batch) that calls the model and returns the loss to train on. The function may change the
batch."""


class ModelWithLoss(nn.Module):
    """Wrapper that gives `model` an output with a `loss`, returned by `compute_loss(model, batch)`."""

    def __init__(self, model: nn.Module, compute_loss: ComputeLoss) -> None:
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss

    def forward(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=self._compute_loss(self.model, batch))


class HeadProfiler(AbstractContextManager["HeadProfiler"]):
    """Profiler of a model's heads: the output layer and the loss, with full or chunked logits. Restores the model on
    exit.

    Raises ChunkedHeadError if the config allows only a chunked head, and the model cannot have a chunked head.
    """

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self.profiled_head = config.heads[0]
        """Name of the head with which the profile's passes run."""
        self._head: ChunkedHead | None = None
        if "chunked" not in config.heads:
            return
        try:
            self._head = ChunkedHead(model)
            self._head.is_on, self._head.is_trial = self.profiled_head == "chunked", True
        except ChunkedHeadError as error:
            if self.profiled_head == "chunked":
                raise
            log.info("Adacc: the head uses full logits (head='plain'): %s", error)

    def __exit__(self, *exception: object) -> None:
        if self._head is not None:
            self._head.remove()

    def check_own(self) -> None:
        """Raise ChunkedHeadError if the config requires a chunked head and the model's forward did not use this
        head."""
        if self._head is not None and self.profiled_head == "chunked":
            self._head.check_used()

    def measure_chunked_head(
        self, measure: Callable[[], T], run_forward: Callable[[], object], measurement: Measurement
    ) -> tuple[T, dict[str, float]] | None:
        """Measure the chunked head: return the result of `measure` with this head, and the times of both heads.

        The times are of the plain and the chunked head in `run_forward`. Return None if the profile's own head is
        chunked, or if the model cannot have a chunked head.
        """
        head = self._head
        if head is None or self.profiled_head == "chunked":
            return None
        head.is_on = True
        try:
            result = measure()
            head.check_used()
            return result, measurement.head_times(partial(_losses, head, run_forward))
        except ChunkedHeadError as error:
            log.info("Adacc: the head uses full logits (head='plain'): %s", error)
            return None
        finally:
            head.is_on = False


def _losses(head: ChunkedHead, run_forward: Callable[[], object]) -> list[LossCall]:
    """Run a forward, and return its losses. Call this outside measurements of memory, because the losses keep tensors
    alive."""
    losses: list[LossCall] = []
    head.on_loss = lambda loss: losses.append(_without_graph(loss))
    try:
        run_forward()
    finally:
        head.on_loss = None
    return losses


def _without_graph(loss: LossCall) -> LossCall:
    rows = loss.rows.detach().requires_grad_(loss.rows.requires_grad)
    return loss.on(rows, loss.call.weight, loss.call.bias)
