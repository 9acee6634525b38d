"""Codecs that are switched off for some activations, under names that batches of all sizes have in common.

The tape of another size may number its values otherwise, or have other ones. What its blocks and modules are called,
and in which order a module makes what, is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from adacc_hf.calls import call_name
from adacc_hf.profiling.codec_options import FINER
from adacc_hf.tracking.tracking import OptionKey

if TYPE_CHECKING:
    from adacc_hf.profile import KindProfile, Profile

SwitchedOff = tuple[str, str, str]
"""A block, an activation of it ("attn:clone", the second one of that name "attn:clone#2"), and a codec."""


def in_all_blocks(profile: Profile, options: Collection[OptionKey]) -> frozenset[SwitchedOff]:
    """`options` of a kind by their names in each block of that kind."""
    names = [_names(kind) for kind in profile.kinds]
    return frozenset(
        (block.name, names[kind][value], codec)
        for block in profile.blocks
        for kind, value, codec in options
        if kind == block.kind
    )


def options_of(profile: Profile, switched_off: Collection[SwitchedOff]) -> frozenset[OptionKey]:
    """The options of `profile` that are switched off in any block of their kind."""
    found = set()
    for block in profile.blocks if switched_off else ():
        kind = profile.kinds[block.kind]
        for value, name in zip(kind.values, _names(kind), strict=True):
            found |= {
                (block.kind, value.index, option.codec)
                for option in value.codecs
                if (block.name, name, option.codec) in switched_off
            }
    return frozenset(found)


def lossy_options(profile: Profile, blocks: Collection[str]) -> frozenset[OptionKey]:
    """All options of the kinds of `blocks` that lose something, and the finer ones that would be offered for them."""
    return frozenset(
        (index, value.index, codec)
        for index in {block.kind for block in profile.blocks if block.name in blocks}
        for value in profile.kinds[index].values
        for option in value.codecs
        if not option.lossless
        for codec in (option.codec, FINER)
    )


def _names(kind: KindProfile) -> list[str]:
    """The name of each value, with its number among those of the same name."""
    seen: Counter[str] = Counter()
    found = []
    for value in kind.values:
        seen[value.name] += 1
        found.append(call_name(value.name, seen[value.name]))
    return found
