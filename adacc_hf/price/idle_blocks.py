"""Idle blocks: blocks that do not run in the profiled batch, or run without gradients, such as a teacher's blocks.

A profile lists them without activations. If a later step trains an idle block, it runs under torch's checkpoint until
such a step has been profiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import IDLE_KIND
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import class_name


class ExecutedBlocks(AbstractContextManager["ExecutedBlocks"]):
    """Names of those of `blocks` that ran, and of those that ran without gradients, until `remove()` is called."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.names: set[str] = set()
        self.untrained: set[str] = set()
        # A hook must not refer to the model, which a copied hook would copy.
        self._hooks = [
            block.register_forward_pre_hook(partial(_note_name, name, self.names, self.untrained))
            for name, block in blocks.items()
        ]

    def remove(self) -> None:
        """Stop recording which blocks run. Further calls have no effect."""
        for hook in self._hooks:
            hook.remove()

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _note_name(name: str, names: set[str], untrained: set[str], *_: Any) -> None:
    names.add(name)
    if not torch.is_grad_enabled():
        untrained.add(name)


def with_idle_blocks(profile: Profile, installation: Installation) -> Profile:
    """Return a copy of `profile` with all blocks of `installation`. Blocks that it lacks are added as idle."""
    profiled_names = {block.name for block in profile.blocks}
    classes = {name: class_name(block) for name, block in installation.modules.items() if name not in profiled_names}
    idle = KindProfile(
        digest=IDLE_KIND, block_class="", values=(), operators=(), slots=(), backward=(), forward=(), forward_ms=0.0
    )
    kinds, base = [*dict.fromkeys(classes.values())], profile.static_bytes
    blocks = [
        BlockProfile(
            name=name,
            kind=len(profile.kinds) + kinds.index(block_class),
            forward_base_bytes=base,
            backward_base_bytes=base,
        )
        for name, block_class in classes.items()
    ]
    return replace(
        profile,
        kinds=(*profile.kinds, *(replace(idle, block_class=block_class) for block_class in kinds)),
        blocks=(*profile.blocks, *blocks),
    )


def describe_uncalled(
    installation: Installation, uncalled: list[str], when: str, executed: ExecutedBlocks | None = None
) -> str:
    """Return an error message that names the blocks that did not train, the cause, and the remedies.

    `executed` are the blocks that ran, if they were recorded.
    """
    blocks = {name: class_name(block) for name, block in installation.modules.items()}
    called = sorted({blocks[name] for name in blocks.keys() - set(uncalled)} - {blocks[name] for name in uncalled})
    verb, is_all = "were not called", len(uncalled) == len(blocks) and executed is not None
    if executed is not None and executed.untrained:
        verb = "ran without gradients"
        remedy = (
            "a reversible network, or torch.no_grad() around them, stores no activations of these blocks, and a policy "
            "would save nothing: train without Adacc, or name the classes of other blocks, "
            "AdaccConfig(block_classes=...)"
        )
    elif is_all and executed is not None and not executed.names:
        remedy = (
            "the model calls another method of them, or only their parts, and a policy needs calls of whole blocks: "
            "move that code into the blocks' forward and let the model call block(...), or name the classes of modules "
            "that the model does call, AdaccConfig(block_classes=...). If the training loop itself calls the blocks, "
            "make all these calls within the step"
        )
    elif is_all:
        verb = "never reached Adacc"
        remedy = (
            "their class's forward was replaced (a fast-kernel patch?): name their class with "
            "AdaccConfig(block_classes=...) so that their forward is wrapped instead"
        )
    else:
        remedy = (
            "use a batch that calls every block (with an image, for a vision model). If the training loop itself calls "
            "a block, such as an encoder whose output it passes to the model, make all these calls within the step. If "
            "the model calls another method of these blocks, let it call block(...). If it never uses them, name the "
            f"classes of blocks that it calls, AdaccConfig(block_classes={tuple(called) or '...'})"
        )
    return f"{len(uncalled)} of {len(blocks)} blocks, {uncalled[0]} first, {verb} {when}: {remedy}"
