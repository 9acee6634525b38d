"""A model around the blocks that store something: its heads, a loss that somebody else makes, and idle blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.artifacts.policy import IDLE_KIND
from adacc_hf.artifacts.profile import BlockProfile, KindProfile, Profile
from adacc_hf.head.head import ChunkedHead
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import StepLayout
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import class_name
from adacc_hf.torch_glue.memory import forward_loss

log = logging.getLogger(__name__)


# Blocks that a batch runs without gradients. They store nothing, so that there is nothing to decide: a profile has them
# as blocks without activations. A step that does train them runs them under torch's checkpoint, until there is a
# profile of such a step.


class RanBlocks:
    """The names of those of `blocks` that ran, with gradients or without, noted until `remove()`."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.names: set[str] = set()
        self._hooks = [block.register_forward_pre_hook(_NoteLoss(name, self.names)) for name, block in blocks.items()]

    def remove(self) -> None:
        """Note nothing more. Harmless when called again."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> RanBlocks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _NoteLoss:
    """A hook that knows no model, so that a copy of a model with it in place copies nothing else."""

    def __init__(self, name: str, names: set[str]) -> None:
        self.name = name
        self.names = names

    def __call__(self, *_: Any) -> None:
        self.names.add(self.name)


def with_idle(profile: Profile, idle: Sequence[str], installation: Installation) -> Profile:
    """`profile` with the blocks called `idle`, after those that store something."""
    modules = installation.modules
    classes = {name: class_name(modules[name]) for name in idle}
    kinds = {each: len(profile.kinds) + index for index, each in enumerate(dict.fromkeys(classes.values()))}
    bases = (profile.static_bytes,) * len(idle)
    return replace(
        profile,
        kinds=(*profile.kinds, *map(_idle_kind, kinds)),
        blocks=(
            *profile.blocks,
            *(
                BlockProfile(name=name, kind=kinds[classes[name]], forward_base_bytes=base, backward_base_bytes=base)
                for name, base in zip(idle, bases, strict=True)
            ),
        ),
        other_heads=tuple(
            replace(head, backward_base_bytes=head.backward_base_bytes + bases) for head in profile.other_heads
        ),
    )


def _idle_kind(block_class: str) -> KindProfile:
    return KindProfile(
        digest=IDLE_KIND,
        block_class=block_class,
        values=(),
        operators=(),
        slots=(),
        backward=(),
        forward=(),
        forward_ms=0.0,
    )


# A model called for a loss that somebody else makes of its outputs.

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


# The heads that a model can have, for its profile: whole logits, and chunked where model and settings allow it.


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
        if self._head is not None and self.own == "chunked":
            self._head.check_used()

    def other(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        measure: Callable[[], StepLayout],
        measurement: Measurement,
    ) -> HeadLayout | None:
        """What `measure` says with the chunked head, where there is another one to compare it with."""
        head = self._head
        if head is None or self.own == "chunked":
            return None
        head.is_on = True
        try:
            layout = measure()
            head.check_used()
            return HeadLayout(layout=layout, ms=measurement.head_times(partial(_losses, head, model, batch)))
        except ChunkedHeadError as error:
            log.info("Adacc: the head stays plain: %s", error)
            return None
        finally:
            head.is_on = False


def _losses(head: ChunkedHead, model: nn.Module, batch: Mapping[str, Any]) -> list[LossCall]:
    """The losses of one step. A pass of its own: what it holds must not be counted by the meter."""
    found: list[LossCall] = []
    head.on_loss = lambda loss: found.append(_without_graph(loss))
    try:
        forward_loss(model, batch)
    finally:
        head.on_loss = None
    return found


def _without_graph(loss: LossCall) -> LossCall:
    rows = loss.rows.detach().requires_grad_(loss.rows.requires_grad)
    return loss.on(rows, loss.call.weight, loss.call.bias)
