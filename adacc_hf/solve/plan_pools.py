"""Pools of plans for the blocks of a profile, with the simulated memory and time of each plan.

A pool contains the plans that the search may give to the blocks of one kind: the frontier of the kind, and the plans
under torch's checkpoint. If these need much more time than the lower bound, or do not fit the budget, the pool is
extended by a frontier with prices in bytes, and by the same frontiers with row-wise modules in tiles.

The least peak is that of plans that do not depend on measured times. It is the same in each process, so that a budget
that one process could use can be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.tiles import most_tiles
from adacc_hf.solve.bounds import TimeBound
from adacc_hf.solve.frontier import BlockProgram
from adacc_hf.solve.milp import PricedPlan, build_block_model, retain_all

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile, Operator
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import Profile

    Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

NO_PEAK = -(1 << 60)
"""Working bytes of a backward that unpacks no saved tensor, so that its peak never counts."""
NS_PER_MS = 1e6


@dataclass(eq=False)
class Candidate:
    """Plan that a block may have, with the block's simulated memory and time under the plan."""

    plan: Plan
    outcome: BlockOutcome
    variant: int
    """Index, in the pool's variants, of the variant of the kind that runs the plan."""
    is_timed: bool
    """True if the choice of the plan depends on measured times."""


class Columns(NamedTuple):
    """Numbers of the candidates of a pool, one array per number."""

    number: Ints
    """Index of the candidate in the pool."""
    stored: Ints
    live: Ints
    host: Ints
    ns: Ints
    forward: Ints
    backward: Ints
    reads: Ints
    """Bit masks of the shared tensors that a candidate's replay reads."""


class PlanPool:
    """Candidates for the blocks of one kind, which has several variants: without and with host memory or tiles."""

    def __init__(self, variants: Sequence[KindProfile], config: AdaccConfig, limits_peak: bool) -> None:
        self.variants: list[KindProfile] = []
        self.candidates: list[Candidate] = []
        self._config = config
        self._programs: list[BlockProgram] = []
        self._columns: dict[bool, Columns] = {}
        # The fewest stored bytes do not depend on times, but the least peak of plans on a frontier does.
        self._is_timed = limits_peak
        self._num_frontiers = 0
        """Number of variants whose frontiers are in the pool. Plans that do not depend on times may be enough."""
        self._add_variants(variants)

    def _add_variants(self, variants: Sequence[KindProfile]) -> None:
        for variant in variants:
            model = build_block_model(variant, self._config)
            number = len(self.variants)
            self.variants.append(variant)
            self._programs.append(BlockProgram(model))
            for plan in (retain_all(model), *model.checkpoints):
                self._add(number, plan, is_timed=False)
            if not self._is_timed:
                self._add_frontier(number)

    def _add_frontier(self, number: int) -> None:
        for plan in self._programs[number].frontier():
            self._add(number, plan, is_timed=self._is_timed)
        self._num_frontiers = number + 1

    def extend(self, variants: Sequence[KindProfile]) -> None:
        """Add the candidates of more variants, and for all variants the frontiers with prices in bytes."""
        self._add_variants(variants)
        for number, variant in enumerate(self.variants):
            by_bytes = build_block_model(with_times_by_bytes(variant), self._config)
            for plan in BlockProgram(by_bytes).frontier():
                self._add(number, PricedPlan.of(variant, plan.plan), is_timed=False)

    def refine(self, variant: int, nbytes: int) -> Candidate | None:
        """Add the fastest plan of a variant that stores at most `nbytes`, if the variant has such a plan."""
        own = [each.outcome.stored_bytes for each in self.candidates if each.variant == variant]
        if nbytes < min(own):
            return None
        return self._add(variant, self._programs[variant].fastest_within(nbytes), is_timed=True)

    def _add(self, variant: int, plan: PricedPlan, *, is_timed: bool) -> Candidate:
        same = next((each for each in self.candidates if each.plan == plan.plan), None)
        if same is None:
            same = Candidate(plan.plan, plan.outcome, variant, is_timed)
            self.candidates.append(same)
        same.is_timed &= is_timed
        self._columns.clear()
        return same

    def columns(self, *, by_time: bool = True) -> Columns:
        """Return the numbers of all candidates or, if not `by_time`, of those that do not depend on measured times."""
        if by_time not in self._columns:
            for variant in range(self._num_frontiers, len(self.variants)) if by_time else ():
                self._add_frontier(variant)
            rows = [
                _row(number, candidate.outcome)
                for number, candidate in enumerate(self.candidates)
                if by_time or not candidate.is_timed
            ]
            self._columns[by_time] = Columns(*np.array(rows, dtype=np.int64).T)
        return self._columns[by_time]


def _row(number: int, outcome: BlockOutcome) -> tuple[int, ...]:
    return (
        number,
        outcome.stored_bytes,
        outcome.live_bytes,
        outcome.host_bytes,
        round(outcome.overhead_ms * NS_PER_MS),
        outcome.forward_working_bytes,
        outcome.working_bytes if outcome.moments else NO_PEAK,
        sum(1 << shared for shared in outcome.shared),
    )


class PlanPools:
    """Pools of the kinds of blocks in a profile, for all heads and budgets."""

    def __init__(self, profile: Profile, config: AdaccConfig, *, limits_peak: bool, host_limit: int) -> None:
        self._profile, self._config = profile, config
        # The fewest stored bytes are on each kind's frontier, and recomputation reaches them at less cost than tiles.
        self.is_extended = not limits_peak
        self._limits_peak, self._host_limit = limits_peak, host_limit

    @cached_property
    def by_kind(self) -> dict[int, PlanPool]:
        """Pool of each kind of block, by the kind's index in the profile."""
        indices = sorted({block.kind for block in self._profile.blocks})
        variants = {index: self._with_host_limits(self._profile.kinds[index]) for index in indices}
        return {index: PlanPool(each, self._config, self._limits_peak) for index, each in variants.items()}

    @cached_property
    def bound(self) -> TimeBound:
        """Lower bound on the time of plans of the pools, and of mixtures of these plans."""
        points = {
            kind: list(zip(columns.stored.tolist(), (columns.ns / NS_PER_MS).tolist(), strict=True))
            for kind, columns in ((kind, pool.columns()) for kind, pool in self.by_kind.items())
        }
        return TimeBound(points)

    def extend(self) -> None:
        """Extend the pools by plans that need more time, and possibly a lower peak."""
        self.is_extended = True
        for index, pool in self.by_kind.items():
            pool.extend([limited for tiled in self._tiled(index) for limited in self._with_host_limits(tiled)])
        self.__dict__.pop("bound", None)  # of fewer plans

    def _tiled(self, index: int) -> list[KindProfile]:
        tiled = self._profile.kinds[index].tiled
        if tiled is None or not self._config.allows_tiles:
            return []
        kind = self._profile.kinds[tiled]
        number = most_tiles_of(kind)
        return [kind.in_tiles(number)] if number else []

    def _with_host_limits(self, kind: KindProfile) -> list[KindProfile]:
        """Return the kind without host memory, with an equal share of the limit for each block, and with the whole
        limit for one block."""
        link = kind.host_link
        if self._config.host_memory is None or link is None:
            return [kind]
        limits = sorted({self._host_limit // len(self._profile.blocks), self._host_limit} - {0})
        return [replace(kind, host_link=None), *(replace(kind, host_link=replace(link, limit_bytes=n)) for n in limits)]


# Times computed from bytes, for results that must not depend on the noise of measurements.

MS_PER_BYTE = 1e-6
"""Assumed time in ms per byte that an operator, a codec or a copy reads or writes. Any positive number gives the same
policies."""


def with_times_by_bytes(kind: KindProfile) -> KindProfile:
    """Return a copy of `kind` in which the time of each operator is proportional to the bytes that it reads and writes,
    and that of a codec to the bytes of the tensor and of its payload."""
    link = kind.host_link
    if link is not None:
        link = replace(link, copy_ms=0.0, to_host_bytes_per_ms=1 / MS_PER_BYTE, to_device_bytes_per_ms=1 / MS_PER_BYTE)
    return replace(
        kind,
        operators=tuple(replace(op, ms=_operator_ms(kind, op)) for op in kind.operators),
        values=tuple(
            replace(value, codecs=tuple(_with_codec_ms(option, value.nbytes) for option in value.codecs))
            for value in kind.values
        ),
        host_link=link,
        forward_ms=1.0,
        extra_ms=0.0,
    )


def _operator_ms(kind: KindProfile, operator: Operator) -> float:
    # A view makes no bytes of its own, but a replay of it is not free: each operator costs at least one byte.
    return MS_PER_BYTE * (1 + sum(kind.values[value].nbytes for value in (*operator.inputs, *operator.outputs)))


def _with_codec_ms(option: CodecOption, nbytes: int) -> CodecOption:
    ms = MS_PER_BYTE * (nbytes + option.nbytes)
    return replace(option, encode_ms=ms, decode_ms=ms)


# Number of tiles of the blocks that run their row-wise modules in tiles: as many as lower the peak of their kind.

ENOUGH_SAVED = 0.01
"""Relative difference of two peaks of a block. If more tiles reduce the peak by less than this fraction, fewer tiles
are enough."""


def most_tiled(profile: Profile) -> Profile:
    """Return a copy in which every block with row-wise modules runs them in as many tiles as lower the peak."""
    tiled = [profile.kind_of(block).tiled for block in profile.blocks]
    return profile.with_tiles([0 if kind is None else most_tiles_of(profile.kinds[kind]) for kind in tiled])


def most_tiles_of(kind: KindProfile) -> int:
    """Return the smallest number of tiles that saves nearly as much memory as the most tiles. With this number, the
    peak of a recomputing block of `kind` is at most the fraction ENOUGH_SAVED above the peak with the most tiles."""
    assert kind.tiles is not None  # the caller passes kinds with tiles
    number = most_tiles(kind.tiles.num_rows)
    if not number:
        return 0
    least = _working_bytes(kind, number)
    while number > 2 and _working_bytes(kind, number // 2) <= (1 + ENOUGH_SAVED) * least:
        number //= 2
    return number


def _working_bytes(kind: KindProfile, number: int) -> int:
    tiled = kind.in_tiles(number)
    outcome = run_block(tiled, recompute_plan(tiled))
    return max(outcome.working_bytes, outcome.forward_working_bytes)
