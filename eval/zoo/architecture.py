"""One architecture that is checked: a tiny random configuration of a model class of Transformers, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

DROPOUT = 0.1
Batch = dict[str, Any]
"""Tensors, and what else the model is to be told."""
MakeBatch = Callable[[torch.Generator], Batch]
Table = Mapping[str, Mapping[str, tuple[str, Mapping[str, Any], MakeBatch]]]
"""By family and model type: the model class, the settings of its configuration, and what makes its batches."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table: what to build and what to feed it."""

    name: str
    """The model type of Transformers."""
    family: str
    model_class: str
    config_class: str
    settings: Mapping[str, Any]
    batch: MakeBatch = field(repr=False)
    block_classes: tuple[str, ...] | None = None
    """Its layers, where they are no GradientCheckpointingLayer of Transformers."""

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        """The model in train mode with random weights: dropout on, caches off, sdpa where it has it."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.settings)
        for part in _configs(config):
            _set_up(part, given=_names(self.settings))
        return getattr(transformers, self.model_class)._from_config(config).train()

    def make_batch(self, seed: int) -> Batch:
        """A batch with labels; every seed gives other values of the same shapes."""
        return self.batch(torch.Generator().manual_seed(seed))


def _configs(config: Any) -> list[Any]:
    """`config` and every configuration inside it: T5's decoder reads `use_cache` from a copy of its own."""
    parts = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    return [config, *(inner for part in parts for inner in _configs(part))]


def _names(settings: Mapping[str, Any]) -> set[str]:
    """The names that `settings` and the mappings in it give a value to."""
    inner = [_names(value) for value in settings.values() if isinstance(value, Mapping)]
    return set(settings).union(*inner)


def _set_up(config: Any, given: set[str]) -> None:
    """Switch caches off, and every dropout on that the settings do not name; layerdrop, which skips blocks, off."""
    config.use_cache = False
    for name, value in vars(config).items():
        is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and name not in given
        if is_rate and "layerdrop" in name:
            setattr(config, name, 0.0)
        elif is_rate and ("dropout" in name or "pdrop" in name):
            setattr(config, name, DROPOUT)
