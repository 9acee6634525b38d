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

from adacc_hf.calls import num_calls
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
        kept = [block.name for block in thin.blocks]
        assert kept == [block.name for block in self.blocks if block.name not in self.dropped]
        own = self._bases(dict(zip(kept, [block.backward_base_bytes for block in thin.blocks], strict=True)))
        kinds = self._kinds({block.name: block.kind for block in thin.blocks})
        cached = {name: _cached_bytes(thin, kinds[name]) for name in self.dropped}
        held = self.missing_bytes + sum(cached.values())
        forward = self._forward_bases({block.name: block.forward_base_bytes for block in thin.blocks}, cached)
        blocks = [
            BlockProfile(
                name=block.name,
                kind=kinds[block.name],
                forward_base_bytes=forward[block.name],
                backward_base_bytes=own.of_block[block.name],
            )
            for block in self.blocks
        ]
        heads = [
            (head, self._bases(dict(zip(kept, head.backward_base_bytes, strict=True)))) for head in thin.other_heads
        ]
        return replace(
            thin,
            blocks=tuple(blocks),
            static_bytes=thin.static_bytes + self.missing_bytes,
            outside_peak_bytes=thin.outside_peak_bytes + held,
            loss_peak_bytes=thin.loss_peak_bytes + self.missing_bytes,
            tail_peak_bytes=thin.tail_peak_bytes + own.added_at_end,
            other_heads=tuple(
                replace(
                    head,
                    outside_peak_bytes=head.outside_peak_bytes + held,
                    loss_peak_bytes=head.loss_peak_bytes + self.missing_bytes,
                    tail_peak_bytes=head.tail_peak_bytes + bases.added_at_end,
                    backward_base_bytes=tuple(bases.of_block.values()),
                )
                for head, bases in heads
            ),
        )

    def _kinds(self, kinds: dict[str, int]) -> dict[str, int]:
        """The kind of every block; one that is left out is of the kind of its run."""
        return {block.name: kinds.get(block.name, kinds[run[-1].name]) for run in _runs(self.blocks) for block in run}

    def _forward_bases(self, bases: dict[str, int], cached: dict[str, int]) -> dict[str, int]:
        """What is live when each block's forward starts, from the same of the blocks that are kept, and from what
        autocast keeps of each one that is left out."""
        found: dict[str, int] = {}
        added = self.missing_bytes
        for run in _runs(self.blocks):
            dropped = [block.name for block in run if block.name in self.dropped]
            kept = [block.name for block in run[len(dropped) :]]
            of_each = cached[dropped[0]] if dropped else 0
            for position, block in enumerate(run):
                # The model may hold what its first block is given: from the second one on that is live besides.
                like = max(position - len(dropped), min(position, 1))
                found[block.name] = bases[kept[like]] + added + (position - like) * of_each
            added += len(dropped) * of_each
        return found

    def _bases(self, bases: dict[str, int]) -> _Bases:
        """What is live when each block's backward starts, from the same of the blocks that are kept."""
        found: dict[str, int] = {}
        gradients = 0
        for run in reversed(_runs(self.blocks)):
            names = [block.name for block in run]
            dropped = [name for name in names if name in self.dropped]
            first_kept = bases[names[len(dropped)]]
            per_block = first_kept - bases[names[len(dropped) + 1]] if dropped else 0
            for name in reversed(names[len(dropped) :]):
                found[name] = bases[name] + self.missing_bytes + gradients
            for name in reversed(dropped):
                gradients += per_block
                found[name] = first_kept + self.missing_bytes + gradients
        in_order = {block.name: found[block.name] for block in self.blocks}
        return _Bases(in_order, self.missing_bytes + gradients)


@dataclass(frozen=True)
class _Bases:
    of_block: dict[str, int]
    """In forward order."""
    added_at_end: int
    """What the blocks that are left out add when backward is over."""


def plan_thinning(model: nn.Module, profile: Profile) -> Thinning:
    """What can be left out of `model`, whose whole profile is `profile`.

    Nothing where layers are of several types by their number, since leaving some out would change the types of others,
    and nothing where blocks are called again.
    """
    types = getattr(getattr(model, "config", None), "layer_types", None)
    is_alike = len(set(types or ())) < 2 and max(num_calls(b.name for b in profile.blocks).values()) == 1
    runs = _runs(profile.blocks) if is_alike else []
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
