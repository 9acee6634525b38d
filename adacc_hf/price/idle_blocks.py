"""Idle blocks: blocks that do not run in the profiled batch, or run without gradients, such as a teacher's blocks.

An idle block stores nothing for backward, so a policy has nothing to decide for it. The profile lists idle blocks as
blocks without activations. If a later step does train an idle block, the block runs under torch's checkpoint until such
a step has been profiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import IDLE_KIND
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import class_name


class ExecutedBlocks:
    """Names of those of `blocks` that ran, with or without gradients, recorded until `remove()` is called."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.names: set[str] = set()
        self._hooks = [
            block.register_forward_pre_hook(_NameRecorder(name, self.names)) for name, block in blocks.items()
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
    """Forward hook that records a block's name while a batch is profiled.

    The hook has no reference to the model, so that a copied hook does not copy the model.
    """

    def __init__(self, name: str, names: set[str]) -> None:
        self.name = name
        self.names = names

    def __call__(self, *_: Any) -> None:
        self.names.add(self.name)


def with_idle_blocks(profile: Profile, installation: Installation) -> Profile:
    """Return a copy of `profile` that contains all blocks of `installation`. Blocks that `profile` lacks are added as
    idle: without activations."""
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


def describe_uncalled(installation: Installation, uncalled: list[str], when: str) -> str:
    """Return an error message that names the blocks that were not called, and the remedies."""
    blocks = {name: class_name(block) for name, block in installation.modules.items()}
    called_classes = sorted({blocks[name] for name in blocks.keys() - set(uncalled)})
    return (
        f"{len(uncalled)} of {len(blocks)} blocks, {uncalled[0]} first, were not called {when}: use a batch that calls "
        f"every block (with an image, for a vision model). If the training loop itself calls a block, such as an "
        f"encoder whose output it passes to the model, make all these calls within the step. If a "
        f"patch replaced the forward of the blocks' class, or the model never uses some blocks, set "
        f"AdaccConfig(block_classes={tuple(called_classes) or '...'})"
    )
