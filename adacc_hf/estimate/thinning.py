"""Traces of a model with a few blocks of each run of equal blocks, and their extension to the whole model.

The operators of a block do not depend on the number of equal blocks, and the step's bytes and times are linear in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.private import modules_of

KEPT = 2
"""Number of blocks that are traced at each end of a run. The first and the last block of a run may differ from the
blocks between them, whose two neighbours give the increment per block."""


class Thinning:
    """Choice of the blocks of `model` that a trace leaves out. `blocks` are all its blocks, by name.

    A run of equal blocks is whole if the configuration has a list of different entries for the layers, because the
    entries of the other layers would change.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._model = model
        self.gaps: dict[str, list[str]] = {}
        """Names of the blocks that are left out, by the name of the block before them."""
        configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
        for parent, names in groupby(blocks, key=_parent_name):
            siblings = {name: blocks[name] for name in names}
            if parent and not any(_differs_by_layer(config, len(siblings)) for config in configs):
                for _, run in groupby(siblings, key=lambda name: _settings_of(blocks[name])):
                    equal = list(run)
                    if len(equal) > 2 * KEPT:
                        self.gaps[equal[KEPT - 1]] = equal[KEPT:-KEPT]
        modules = [blocks[name] for gap in self.gaps.values() for name in gap]
        self.missing_bytes = distinct_bytes(t for module in modules for t in (*module.parameters(), *module.buffers()))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Remove the blocks from the model inside the `with` block."""
        parents = [self._model.get_submodule(_parent_name(name)) for name in self.gaps]
        all_modules = [(modules_of(parent), dict(modules_of(parent))) for parent in parents]
        for name in (name for gap in self.gaps.values() for name in gap):
            del modules_of(self._model.get_submodule(_parent_name(name)))[name.rpartition(".")[2]]
        try:
            yield
        finally:
            for modules, original in all_modules:
                modules.clear()
                modules.update(original)

    def is_confirmed_by(self, thin: Profile) -> bool:
        """Return True if the blocks before and after each gap are of one kind in `thin`, and were called once."""
        followers = zip(thin.blocks, thin.blocks[1:], strict=False)
        equal = {block.name for block, following in followers if block.kind == following.kind}
        names = [block.name for block in thin.blocks]
        return self.gaps.keys() <= equal and all(names.count(name) == 1 and "#" not in name for name in names)

    def expand(self, thin: Profile, backward_ms: Mapping[str, float]) -> Profile:
        """Return the profile of the whole model from `thin`, which lacks the blocks that are left out.

        `backward_ms` are the milliseconds of each block's backward.
        """
        names = [name for block in thin.blocks for name in (block.name, *self.gaps.get(block.name, ()))]
        counts = [len(self.gaps.get(block.name, ())) for block in thin.blocks]
        missing = self.missing_bytes
        forward, cached_bytes = _extended([block.forward_base_bytes for block in thin.blocks], counts)
        bases = [block.backward_base_bytes for block in thin.blocks]
        backward, gradient_bytes = _extended(bases[::-1], [*counts[-2::-1], 0])
        kinds = [block.kind for block, count in zip(thin.blocks, counts, strict=True) for _ in range(1 + count)]
        block_ms = (
            count * (thin.kind_of(block).forward_ms + backward_ms.get(following.name, 0.0))
            for block, following, count in zip(thin.blocks, thin.blocks[1:], counts, strict=False)
        )
        return replace(
            # Casts that autocast caches until the forward's end count even if the peak is before the blocks.
            thin.with_extra_head_bytes(missing + cached_bytes, missing),
            blocks=tuple(
                BlockProfile(
                    name=name, kind=kind, forward_base_bytes=missing + first, backward_base_bytes=missing + second
                )
                for name, kind, first, second in zip(names, kinds, forward, backward[::-1], strict=True)
            ),
            static_bytes=thin.static_bytes + missing,
            step_ms=thin.step_ms + sum(block_ms),
            tail_peak_bytes=thin.tail_peak_bytes + missing + gradient_bytes,
        )


def _extended(values: Sequence[int], counts: Sequence[int]) -> tuple[list[int], int]:
    """Insert counts[i] values after the i-th, which continue the step to the next one. Return all, and the increase."""
    increase, extended = 0, []
    for index, (value, count) in enumerate(zip(values, counts, strict=True)):
        extended.append(value + increase)
        for _ in range(count):
            increase += values[index + 1] - value
            extended.append(value + increase)
    return extended, increase


def _settings_of(block: nn.Module) -> tuple[Any, ...]:
    """Return what decides the operators of a block: its modules with their settings, and its tensors."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return repr(block), [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


def _differs_by_layer(config: Any, num_layers: int) -> bool:
    entries = vars(config).values() if isinstance(config, PretrainedConfig) else ()
    return any(
        isinstance(each, (list, tuple)) and len(each) == num_layers and len(set(map(str, each))) > 1 for each in entries
    )


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]
