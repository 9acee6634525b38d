"""The heads that a model can have, for its profile: whole logits, and chunked where model and settings allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.head import ChunkedHead
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.step_memory import StepLayout
from adacc_hf.torch_glue.memory import forward_loss

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The memory of a step with the chunked head, and the times of both heads."""

    layout: StepLayout
    ms: dict[str, float]


class HeadSurvey(AbstractContextManager["HeadSurvey"]):
    """What is known of a model's heads while it is profiled. The model is as before when it is left.

    Raises ChunkedHeadError if the config allows nothing but a chunked head, which the model cannot have.
    """

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self.own = config.heads[0]
        """The head that the profile's passes run with."""
        self._head: ChunkedHead | None = None
        if "chunked" not in config.heads:
            return
        try:
            self._head = ChunkedHead(model)
            self._head.is_on, self._head.is_tried = self.own == "chunked", True
        except ChunkedHeadError as error:
            if self.own == "chunked":
                raise
            log.info("Adacc: the head stays plain: %s", error)

    def __exit__(self, *exception: object) -> None:
        if self._head is not None:
            self._head.remove()

    def check_own(self) -> None:
        """Raise ChunkedHeadError if a chunked head was asked for and the model's forward had no use for it."""
        if self.own == "chunked":
            self._head.check_used()

    def other(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        measure: Callable[[], StepLayout],
        measurement: Measurement,
    ) -> HeadLayout | None:
        """What `measure` says with the chunked head, where there is another one to compare it with."""
        if self._head is None or self.own == "chunked":
            return None
        self._head.is_on = True
        try:
            layout = measure()
            self._head.check_used()
            return HeadLayout(layout=layout, ms=measurement.head_times(lambda: self._losses(model, batch)))
        except ChunkedHeadError as error:
            log.info("Adacc: the head stays plain: %s", error)
            return None
        finally:
            self._head.is_on = False

    def _losses(self, model: nn.Module, batch: Mapping[str, Any]) -> list[LossCall]:
        """The losses of one step. A pass of its own: what it holds must not be counted by the meter."""
        found: list[LossCall] = []
        self._head.on_loss = lambda loss: found.append(_without_graph(loss))
        try:
            forward_loss(model, batch)
        finally:
            self._head.on_loss = None
        return found


def _without_graph(loss: LossCall) -> LossCall:
    rows = loss.rows.detach().requires_grad_(loss.rows.requires_grad)
    return loss.on(rows, loss.call.weight, loss.call.bias)
