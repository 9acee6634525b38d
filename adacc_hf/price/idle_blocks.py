"""Idle blocks: blocks that do not run in the profiled batch, or run without gradients, such as a teacher's blocks.

A profile lists them without activations. If a later step trains an idle block, it runs under torch's checkpoint until
such a step has been profiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import IDLE_KIND
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import class_name


class ExecutedBlocks:
    """Names of those of `blocks` that ran, and of those that ran without gradients, until `remove()` is called."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.names: set[str] = set()
        self.untrained: set[str] = set()
        self._hooks = [
            block.register_forward_pre_hook(_NameRecorder(name, self.names, self.untrained))
            for name, block in blocks.items()
        ]

    def remove(self) -> None:
        """Stop recording which blocks run. Further calls have no effect."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> ExecutedBlocks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _NameRecorder:
    """Forward hook that records a block's name. It has no reference to the model, which a copied hook would copy."""

    def __init__(self, name: str, names: set[str], untrained: set[str]) -> None:
        self.name = name
        self.names, self.untrained = names, untrained

    def __call__(self, *_: Any) -> None:
        self.names.add(self.name)
        if not torch.is_grad_enabled():
            self.untrained.add(self.name)


def with_idle_blocks(profile: Profile, installation: Installation) -> Profile:
    """Return a copy of `profile` with all blocks of `installation`. Blocks that it lacks are added as idle."""
    profiled_names = {block.name for block in profile.blocks}
    classes = {name: class_name(block) for name, block in installation.modules.items() if name not in profiled_names}
    kinds = {
        block_class: len(profile.kinds) + index for index, block_class in enumerate(dict.fromkeys(classes.values()))
    }
    bases = (profile.static_bytes,) * len(classes)
    return replace(
        profile,
        kinds=(*profile.kinds, *map(_idle_kind, kinds)),
        blocks=(
            *profile.blocks,
            *(
                BlockProfile(name=name, kind=kinds[block_class], forward_base_bytes=base, backward_base_bytes=base)
                for (name, block_class), base in zip(classes.items(), bases, strict=True)
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


def describe_uncalled(
    installation: Installation, uncalled: list[str], when: str, executed: ExecutedBlocks | None = None
) -> str:
    """Return an error message that names the blocks that did not train, the cause, and the remedies.

    `executed` are the blocks that ran, if they were recorded.
    """
    blocks = {name: class_name(block) for name, block in installation.modules.items()}
    called = sorted({blocks[name] for name in blocks.keys() - set(uncalled)} - {blocks[name] for name in uncalled})
    verb, untrained = "were not called", () if executed is None else executed.untrained
    if untrained:
        verb = "ran without gradients"
        remedy = (
            "a reversible network, or torch.no_grad() around them, stores no activations of these blocks, and a policy "
            "would save nothing: train without Adacc, or name the classes of other blocks, "
            "AdaccConfig(block_classes=...)"
        )
    elif len(uncalled) == len(blocks) and executed is not None and not executed.names:
        remedy = (
            "the model calls another method of them, or only their parts, and a policy needs calls of whole blocks: "
            "move that code into the blocks' forward and let the model call block(...), or name the classes of modules "
            "that the model does call, AdaccConfig(block_classes=...). If the training loop itself calls the blocks, "
            "make all these calls within the step"
        )
    elif len(uncalled) == len(blocks) and executed is not None:
        verb = "never reached Adacc"
        remedy = (
            "their class's forward was replaced (a fast-kernel patch?): name their class with "
            "AdaccConfig(block_classes=...) so that their forward is wrapped instead"
        )
    else:
        remedy = (
            "use a batch that calls every block (with an image, for a vision model). If the training loop itself calls "
            "a block, such as an encoder whose output it passes to the model, make all these calls within the step. If "
            "the model calls another method of these blocks, let it call block(...)"
        ) + (f". If it never uses them, set AdaccConfig(block_classes={tuple(called)})" if called else "")
    return f"{len(uncalled)} of {len(blocks)} blocks, {uncalled[0]} first, {verb} {when}: {remedy}"
