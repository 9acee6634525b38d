"""Number of tiles of the blocks that run their row-wise modules in tiles.

The search may give a block plans with as many tiles as lower the peak. At the end, each block gets the fewest tiles
with which the step still fits the budget, because every further tile costs launches of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.tiles import most_tiles

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile
    from adacc_hf.artifacts.policy import Plan
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


def with_fewest_tiles(profile: Profile, plans: Sequence[Plan], budget_bytes: int) -> list[Plan]:
    """Return `plans` with the number of tiles of each block reduced as far as the peak still fits `budget_bytes`, as it
    does under `plans`.

    Row-wise modules run on one tile (group of rows) at a time. Numbers of tiles are powers of two.
    """
    most = [0 if plan.tiling is None else plan.tiling.num_tiles for plan in plans]
    if not any(most):
        return list(plans)
    number = 2
    while not _fits(profile, plans, [min(number, each) for each in most], budget_bytes):
        number *= 2
    counts = [min(number, each) for each in most]
    for index, each in enumerate(counts):
        fewer = 2
        while fewer < each:
            numbers = [*counts[:index], fewer, *counts[index + 1 :]]
            if _fits(profile, plans, numbers, budget_bytes):
                counts = numbers
                break
            fewer *= 2
    return _with_tiles(plans, counts)


def _fits(profile: Profile, plans: Sequence[Plan], num_tiles: Sequence[int], budget_bytes: int) -> bool:
    return simulate(profile, _with_tiles(plans, num_tiles)).peak_bytes <= budget_bytes


def _with_tiles(plans: Sequence[Plan], num_tiles: Sequence[int]) -> list[Plan]:
    return [
        plan if plan.tiling is None else replace(plan, tiling=replace(plan.tiling, num_tiles=number))
        for plan, number in zip(plans, num_tiles, strict=True)
    ]
