"""Architectures to check: tiny random configurations of model classes of Transformers, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

DROPOUT = 0.1
Batch = dict[str, Any]
"""Keyword arguments of the model: tensors, and options."""
MakeBatch = Callable[[torch.Generator], Batch]
Row = tuple[str, Mapping[str, Any], MakeBatch]
"""Model class, settings of its configuration, and maker of its batches."""
Table = Mapping[str, Mapping[str, Row]]
"""Rows by family and model type."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Row of the table of architectures: a model configuration and its batches."""

    name: str
    """Model type in Transformers."""
    family: str
    model_class: str
    config_class: str
    settings: Mapping[str, Any]
    batch: MakeBatch = field(repr=False)
    block_classes: tuple[str, ...] | None = None
    """Classes of its blocks, if they do not derive from GradientCheckpointingLayer of Transformers."""

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        """Return the model in train mode with random weights: dropout on, caches off, sdpa if it is supported."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.settings)
        for part in _configs(config):
            _set_defaults(part, explicit_names=_names(self.settings))
        return getattr(transformers, self.model_class)._from_config(config).train()

    def make_batch(self, seed: int) -> Batch:
        """Return a batch with labels. Another seed gives other values of the same shapes."""
        return self.batch(torch.Generator().manual_seed(seed))


def _configs(config: Any) -> list[Any]:
    """Return `config` and all configurations nested in it: T5's decoder reads `use_cache` from a copy of its own."""
    parts = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    return [config, *(inner for part in parts for inner in _configs(part))]


def _names(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of all settings, including the settings in nested mappings."""
    return set(settings).union(*(_names(value) for value in settings.values() if isinstance(value, Mapping)))


def _set_defaults(config: Any, explicit_names: set[str]) -> None:
    """Turn off caches and layerdrop (which skips blocks), and turn on every dropout, except rates among
    `explicit_names`."""
    config.use_cache = False
    for name, value in vars(config).items():
        is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and name not in explicit_names
        if is_rate and "layerdrop" in name:
            setattr(config, name, 0.0)
        elif is_rate and ("dropout" in name or "pdrop" in name):
            setattr(config, name, DROPOUT)


def row(model_class: str, batch: MakeBatch, *parts: Mapping[str, Any], **settings: Any) -> Row:
    """Return a row whose settings are `parts` and `settings` together. Later ones win."""
    merged: dict[str, Any] = {}
    for part in (*parts, settings):
        merged |= part
    return model_class, merged, batch
