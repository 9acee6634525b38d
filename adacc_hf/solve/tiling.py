"""Number of tiles of the blocks that run their row-wise modules in tiles: as many as lower the peak of their kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.tiles import most_tiles

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile
    from adacc_hf.artifacts.profile import Profile

ENOUGH = 0.01
"""Relative difference of two peaks of a block. If more tiles reduce the peak by less than this fraction, fewer tiles
are enough."""


def most_tiled(profile: Profile) -> Profile:
    """Return a copy in which every block with row-wise modules runs them in as many tiles as lower the peak."""
    tiled = [profile.kind_of(block).tiled for block in profile.blocks]
    return profile.with_tiles([0 if kind is None else most_tiles_of(profile.kinds[kind]) for kind in tiled])


def most_tiles_of(kind: KindProfile) -> int:
    """Return the smallest number of tiles that saves nearly as much memory as the most tiles. With this number, the
    peak of a recomputing block of `kind` is at most the fraction ENOUGH above the peak with the most tiles."""
    assert kind.tiles is not None  # the caller passes kinds with tiles
    number = most_tiles(kind.tiles.num_rows)
    if not number:
        return 0
    least = _working_bytes(kind, number)
    while number > 2 and _working_bytes(kind, number // 2) <= (1 + ENOUGH) * least:
        number //= 2
    return number


def _working_bytes(kind: KindProfile, number: int) -> int:
    tiled = kind.in_tiles(number)
    outcome = run_block(tiled, recompute_plan(tiled))
    return max(outcome.working_bytes, outcome.forward_working_bytes)
