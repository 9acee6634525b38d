"""A model around its blocks: a loss that somebody else makes, and blocks that a batch runs without gradients.

They store nothing, so that there is nothing to decide. A profile has them as blocks without activations. A step that
does train them runs them under torch's checkpoint, until there is a profile of such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.policy import IDLE_KIND
from adacc_hf.artifacts.profile import BlockProfile, KindProfile, Profile
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import class_name


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
    classes = {name: class_name(installation.blocks[name].block) for name in idle}
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
