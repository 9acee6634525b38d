"""A model with only a few blocks of each run of equal ones, and the profile of the whole from the profile of that.

A block's tape does not depend on how many of its like there are. What does is linear in their number: parameters, and
the gradients that are there when a block's backward starts. In the head, all casts of parameters that autocast keeps
until forward ends are counted, though the peak may come after: there the estimate may be too high, never too low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from adacc_hf.memory import distinct_bytes
from adacc_hf.profile import BlockProfile, Profile

KEPT = 3
"""Blocks of a run that are traced: from two neighbours follows what one more adds, but the last may be special."""


@dataclass(frozen=True)
class Thinning:
    """Which blocks are left out, and the profile of the whole model that the others are to give."""

    blocks: tuple[BlockProfile, ...]
    """All blocks, in forward order."""
    dropped: frozenset[str]
    missing_bytes: int
    """Parameters and buffers of what is left out."""

    def expand(self, thin: Profile) -> Profile:
        """The profile of the whole model from that of the thinned one."""
        kept = [block for block in self.blocks if block.name not in self.dropped]
        assert [block.name for block in kept] == [block.name for block in thin.blocks]
        missing = self.missing_bytes
        bases = {block.name: block.backward_base_bytes for block in thin.blocks}
        kinds = {block.name: block.kind for block in thin.blocks}
        blocks: list[BlockProfile] = []
        gradients = casts = 0
        for run in reversed(_runs(self.blocks)):
            names = [block.name for block in run]
            per_block = bases[names[-KEPT]] - bases[names[1 - KEPT]] if names[0] in self.dropped else 0
            for behind, name in enumerate(reversed(names)):
                extra = per_block * max(0, behind - KEPT + 1) if name in self.dropped else 0
                base = bases[name] if name in bases else bases[names[-KEPT]]
                kind = kinds.get(name, kinds[names[-1]])
                nbytes = base + missing + gradients + extra
                blocks.append(BlockProfile(name=name, kind=kind, backward_base_bytes=nbytes))
            num_dropped = sum(name in self.dropped for name in names)
            gradients += per_block * num_dropped
            casts += num_dropped * _cached_bytes(thin, kinds[names[-1]])
        return replace(
            thin,
            blocks=tuple(reversed(blocks)),
            static_bytes=thin.static_bytes + missing,
            forward_base_bytes=thin.forward_base_bytes + missing + casts,
            outside_peak_bytes=thin.outside_peak_bytes + missing + casts,
            tail_peak_bytes=thin.tail_peak_bytes + missing + gradients,
        )


def plan_thinning(model: nn.Module, profile: Profile) -> Thinning:
    """What can be left out of `model`, whose whole profile is `profile`.

    Nothing where layers are of several types by their number, since leaving some out would change the types of others.
    """
    types = getattr(getattr(model, "config", None), "layer_types", None)
    runs = _runs(profile.blocks) if len(set(types or ())) < 2 else []
    dropped = [block.name for run in runs for block in run[:-KEPT]]
    modules = [model.get_submodule(name) for name in dropped]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return Thinning(tuple(profile.blocks), frozenset(dropped), distinct_bytes(tensors))


@contextmanager
def thinned(model: nn.Module, thinning: Thinning) -> Iterator[None]:
    """While open, the blocks that `thinning` leaves out are not in `model`."""
    parents = [model.get_submodule(path) for path in {_parent(name) for name in thinning.dropped}]
    before = [(parent, dict(parent._modules)) for parent in parents]
    for name in thinning.dropped:
        del model.get_submodule(_parent(name))._modules[name.rpartition(".")[2]]
    try:
        yield
    finally:
        for parent, modules in before:
            parent._modules.clear()
            parent._modules.update(modules)


def _cached_bytes(profile: Profile, kind: int) -> int:
    """What autocast keeps of one block until the whole forward ends."""
    return sum(value.nbytes for value in profile.kinds[kind].values if value.cached and value.producer is not None)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _runs(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    """Neighbours of one kind in one list of layers."""
    return [list(run) for _, run in groupby(blocks, key=lambda block: (_parent(block.name), block.kind))]
