"""Choice of the blocks that run their row-wise modules in tiles, and of the number of tiles.

The last blocks of a model need tiles first, because their backward begins while all earlier blocks store activations.
So the candidates run all blocks, the last half, or the last quarter in tiles, with as many tiles as lower the peak. The
integer program then chooses the actions of all activations for each candidate. At the end, each block gets the fewest
tiles with which the step still fits the budget, because every further tile costs launches of kernels.
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
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import KindProfile
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import Profile

ENOUGH = 0.01
"""Relative difference of two peaks of a block. If more tiles reduce the peak by less than this fraction, fewer tiles
are enough."""
SHARES = (1, 2, 4)
"""One divisor for each candidate: the candidate runs the last 1/1, 1/2 or 1/4 of the blocks in tiles."""


def tiled_profiles(profile: Profile, config: AdaccConfig) -> list[Profile]:
    """Return `profile` without tiles, followed by its copies in which some blocks run in tiles."""
    most = _most_tiles(profile) if config.allows_tiles else []
    profiles = {(0,) * len(profile.blocks): profile.untiled}
    for share in SHARES if any(most) else ():
        first = len(most) - max(1, len(most) // share)
        numbers = tuple(number if index >= first else 0 for index, number in enumerate(most))
        if numbers not in profiles:
            profiles[numbers] = profile.with_tiles(numbers)
    return list(profiles.values())


def most_tiled(profile: Profile) -> Profile:
    """Return a copy in which every block with row-wise modules runs them in as many tiles as lower the peak."""
    return profile.with_tiles(_most_tiles(profile))


def _most_tiles(profile: Profile) -> list[int]:
    """Return the largest useful number of tiles of each block: a power of two, or 0 for a block without tiles."""
    numbers = {
        kind.tiled: _most_tiles_of(profile.kinds[kind.tiled]) for kind in profile.kinds if kind.tiled is not None
    }
    indices = [profile.kind_of(block).tiled for block in profile.blocks]
    return [0 if index is None else numbers[index] for index in indices]


def _most_tiles_of(kind: KindProfile) -> int:
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


def with_fewest_tiles(profile: Profile, plans: Sequence[Plan], budget_bytes: int) -> tuple[Profile, list[Plan]]:
    """Return (profile, plans) with the number of tiles of each block reduced as far as the peak still fits
    `budget_bytes`.

    Row-wise modules run on one tile (group of rows) at a time. `profile` and `plans` must have the same numbers of
    tiles, with which the peak fits `budget_bytes`. Numbers of tiles are powers of two.
    """
    most = [0 if plan.tiling is None else plan.tiling.num_tiles for plan in plans]
    if not any(most):
        return profile, list(plans)
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
    return profile.with_tiles(counts), _with_tiles(plans, counts)


def _fits(profile: Profile, plans: Sequence[Plan], num_tiles: Sequence[int], budget_bytes: int) -> bool:
    return simulate(profile, _with_tiles(plans, num_tiles)).peak_bytes <= budget_bytes


def _with_tiles(plans: Sequence[Plan], num_tiles: Sequence[int]) -> list[Plan]:
    return [
        plan if plan.tiling is None else replace(plan, tiling=replace(plan.tiling, num_tiles=number))
        for plan, number in zip(plans, num_tiles, strict=True)
    ]
