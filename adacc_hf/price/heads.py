"""Profiling of a model's heads (output layer and loss, with full or chunked logits), and of models that return no
loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    """Wrapper of a `model` that returns no loss. The wrapper's output has a `loss`, computed by `compute_loss(model,
    batch)`."""

    def __init__(self, model: nn.Module, compute_loss: ComputeLoss) -> None:
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss

    def forward(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=self._compute_loss(self.model, batch))


class HeadProfiler(AbstractContextManager["HeadProfiler"]):
    """Profiler of a model's heads: the output layer and the loss, with full or chunked logits. Restores the model on
    exit.

    The constructor raises ChunkedHeadError if the config allows only a chunked head, and the model cannot have one.
    """

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self.profiled_head = config.heads[0]
        """Name of the head ("plain" or "chunked") with which the model runs while it is profiled."""
        self._head: ChunkedHead | None = None
        self._is_rejected = False
        """True if the model cannot run with the chunked head. The head stays installed until the exit, because its
        layer is part of the state that extra runs restore."""
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
        """Raise ChunkedHeadError if the model is profiled with the chunked head and its forward did not use this
        head."""
        if self._head is not None and self.profiled_head == "chunked":
            self._head.check_used()

    def try_chunked(self, measure: Callable[[], T]) -> T | None:
        """Return the result of `measure()` with the chunked head. Run the model with the profiled head afterwards.

        Return None if the model is profiled with the chunked head anyway, or if the model cannot have a chunked head.
        """
        head = self._head
        if head is None or self._is_rejected or self.profiled_head == "chunked":
            return None
        head.is_on = True
        try:
            result = measure()
            head.check_used()
            return result
        except ChunkedHeadError as error:
            log.info("Adacc: the head uses full logits (head='plain'): %s", error)
            self._is_rejected = True
            return None
        finally:
            head.is_on = False

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` at each call of the output layer in the `with` block, if the model may have a chunked head."""
        if self._head is not None:
            self._head.on_call = call
        try:
            yield
        finally:
            if self._head is not None:
                self._head.on_call = None

    def times(self, run_forward: Callable[[], object], measurement: Measurement) -> dict[str, float]:
        """Return the times of the plain and the chunked head, measured on the losses that `run_forward()` computes.

        Call this method only after `try_chunked` has returned a result.
        """
        head = self._head
        assert head is not None
        head.is_on = True
        try:
            return measurement.head_times(partial(_losses_of_head, head, run_forward))
        finally:
            head.is_on = False


def _losses_of_head(head: ChunkedHead, run_forward: Callable[[], object]) -> list[LossCall]:
    """Run a forward, and return the losses that `head` (output layer and loss) computes. Do not call this function
    while memory is measured, because the losses keep tensors alive."""
    losses: list[LossCall] = []
    head.on_loss = lambda loss: losses.append(_detached_loss(loss))
    try:
        run_forward()
    finally:
        head.on_loss = None
    return losses


def _detached_loss(loss: LossCall) -> LossCall:
    """Return a copy of a recorded loss whose rows (inputs of the output layer) are detached from the graph, to time the
    head."""
    rows = loss.rows.detach().requires_grad_(loss.rows.requires_grad)
    return loss.on(rows, loss.call.weight, loss.call.bias)
