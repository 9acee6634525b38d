"""The search for the fastest policy within a budget, for one head: what is looked at in which order, and what is not.

No policy that is looked at depends on the budget, so that a larger one never costs time. What cannot be faster than
what was found is not looked for: linear bounds (`frontier.least_ms`) say so before a program is run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from adacc_hf.artifacts.config import AdaccConfig, Budget, what_was_meant
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import EarlierBlocks, simulate
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.baselines import greedy_policies
from adacc_hf.solve.frontier import MixtureProgram, chain, fixed_bytes, frontiers, least_ms, overhead_ms, stored_bytes
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import KindModel, PricedPlan, build_block_model, retain_all
from adacc_hf.solve.minimum_peak import PeakOracle, least_bound, least_outcome, local_search
from adacc_hf.solve.simple_policies import policy_of_plans

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.solve.minimum_peak import Outcomes

    Fits = Callable[[list[PricedPlan]], bool]

REFINEMENTS = 4
"""Amounts of stored bytes tried between two policies of the chain, which differ in one block: the same for every budget
between them, so that more memory never costs time. Each is a run of HiGHS (10 to 30 ms)."""
MISSES = 4
"""Different policies with one plan per kind that may be too large in a row before no larger one is tried. A larger
budget never tries fewer: what fits the smaller one fits it too."""
ENDS = 4
"""Plans at a frontier's end that are tried for all blocks of a kind, for a peak that is low enough: the very last ones
replay so much that their working set is larger again."""


class Kinds:
    """The programs of a profile's kinds, and their frontiers, which depend on neither head nor budget."""

    def __init__(self, profile: Profile, config: AdaccConfig) -> None:
        self.plain_stored_bytes = profile.plain_stored_bytes
        """What fractions are fractions of, whatever the head."""
        self.log = SolverLog(gap=config.solver_gap, seconds=config.solver_seconds)
        self.models: list[KindModel] = [build_block_model(kind, config) for kind in profile.kinds]
        self.outcomes: Outcomes = {}

    @cached_property
    def frontiers(self) -> list[list[PricedPlan]]:
        return frontiers(self.log, self.models)


class PolicySearch:
    """The search for one profile and config."""

    def __init__(self, profile: Profile, config: AdaccConfig, kinds: Kinds) -> None:
        self.profile = profile
        self.config = config
        self.kinds = kinds
        self.log = kinds.log
        self.models = kinds.models
        self.oracle = PeakOracle(profile, kinds.outcomes)
        retained = [retain_all(model) for model in self.models]
        self.plain = [retained[block.kind] for block in profile.blocks]
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_blocks = [blocks[kind] for kind in range(len(self.models))]
        """Of each kind."""
        self.head_ms = profile.head_overhead_ms
        """Time that the profile's head takes beyond the plain one."""
        self._proven_ms: float | None = None

    def within(self, budget: Budget, incumbent_ms: float = math.inf) -> list[PricedPlan] | None:
        """The plan of each block, in the fastest policy found.

        If none is faster than `incumbent_ms`, any other, or None. Raises InfeasibleBudgetError if nothing fits, unless
        the incumbent was enough to give up.
        """
        find = self._within_peak if budget.of_peak else self._within_stored
        found = find(budget, incumbent_ms)
        return min(found, key=self.rank, default=None)

    def _within_stored(self, budget: Budget, incumbent_ms: float) -> list[list[PricedPlan]]:
        if self._stored(self.plain) <= budget.nbytes:
            return [self.plain]
        least = self._uniform.least_bytes()
        if self._stored(least) > budget.nbytes:
            plain_bytes = self.kinds.plain_stored_bytes
            raise _infeasible_stored(self.profile, self.config, budget, least, self._stored(least), plain_bytes)
        columns = self.kinds.frontiers

        def fits(policy: list[PricedPlan]) -> bool:
            return self._stored(policy) <= budget.nbytes

        found = [least]
        if len(self.models) > 1:
            found += self._chained(columns, budget, fits, incumbent_ms)
        else:
            found += itertools.islice(filter(fits, self._chain(columns)), 1)
            found += self._fastest(self._mixture(columns, 0), budget.nbytes, self._least_rank(found, incumbent_ms))
        # One plan per kind may be no mixture of the frontiers, and faster where kinds have few blocks.
        found += self._fastest(self._uniform, budget.nbytes, self._least_rank(found, incumbent_ms))
        if len(self.plain) == 1 and not self.log.num_unproven:
            # The program's gap is a part of what the blocks cost.
            blocks_ms = self._least_rank(found, incumbent_ms) - self.head_ms
            self._proven_ms = (1 - self.log.worst_gap) * blocks_ms + self.head_ms
        found += self._greedy(fits, self._least_rank(found, incumbent_ms))
        return [self.oracle.arranged(policy) for policy in found]

    def _within_peak(self, budget: Budget, incumbent_ms: float) -> list[list[PricedPlan]]:
        if self.oracle.peak_bytes(self.plain) <= budget.nbytes:
            return [self.plain]
        columns = self.kinds.frontiers
        fits = self._fits_peak(budget)
        found = list(self._chained(columns, budget, fits, incumbent_ms, with_one_plans=True))
        if found:
            found += self._greedy(fits, self._least_rank(found, incumbent_ms))
        if self._least_rank(found, incumbent_ms) <= self.bound_ms(self._reachable(columns)):
            return found
        # Checkpointed blocks store more than the least, and need less than all replays while backward runs, perhaps.
        wider = [[*frontier, *model.checkpoints] for frontier, model in zip(columns, self.models, strict=True)]
        start = self.oracle.least_peak(wider)
        start_bytes = self.oracle.peak_bytes(start)
        if start_bytes <= budget.nbytes:
            found = [start, *(found or self._greedy(fits, incumbent_ms))]
        # Policies below the frontiers' least peak are looked for where one could be the best: at larger budgets too,
        # or more memory could cost time.
        if self._least_rank(found, incumbent_ms) > self.bound_ms(Budget(start_bytes, start_bytes, of_peak=True)):
            trail = local_search(self.oracle, self.models, wider, start)
            found += filter(fits, trail)
            if not found:
                least = self._least_peak(columns, trail[-1])
                if not fits(least):
                    bound = least_bound(self.profile, columns)
                    raise _infeasible_peak(self.profile, self.config, budget, least, bound)
                found = [least]
        return found

    def _least_peak(self, columns: Sequence[Sequence[PricedPlan]], policy: list[PricedPlan]) -> list[PricedPlan]:
        """`policy`, or what is found for a budget of one byte less than its peak; and so on."""
        while True:
            nbytes = self.oracle.peak_bytes(policy) - 1
            budget = Budget(nbytes, nbytes, of_peak=True)
            fits = self._fits_peak(budget)
            others = self._chained(columns, budget, fits, math.inf, with_one_plans=True)
            others += self._greedy(fits, math.inf)
            if not others:
                return policy
            policy = min(others, key=self.oracle.peak_bytes)

    def _fits_peak(self, budget: Budget) -> Fits:
        """Whether a policy's peak keeps to the budget."""
        limit = self._limit_bytes(budget)

        def fits(policy: list[PricedPlan]) -> bool:
            # The sum first, which takes no simulation of plans that are far too large.
            return sum(c.nbytes for c in policy) <= limit and self.oracle.peak_bytes(policy) <= budget.nbytes

        return fits

    def _reachable(self, columns: Sequence[Sequence[PricedPlan]]) -> Budget:
        """A budget that some policy made of frontier plans keeps to; quick to find, and not the least."""
        ends = ([frontier[max(-back, -len(frontier))] for frontier in columns] for back in range(1, ENDS + 1))
        policies = ([end[block.kind] for block in self.profile.blocks] for end in ends)
        nbytes = min(self.oracle.peak_bytes(policy) for policy in policies)
        return Budget(nbytes, nbytes, of_peak=True)

    def bound_ms(self, budget: Budget) -> float:
        """What no policy within the budget can beat, to `frontier.SLOPE_TOLERANCE`; infinity if none can fit."""
        if self._proven_ms is not None:
            return self._proven_ms
        in_head = self._least_ms(self._limit_bytes(budget))
        return max(in_head, self._backward_ms(budget.nbytes)) if budget.of_peak else in_head

    def _backward_ms(self, nbytes: int) -> float:
        """What no policy can beat for what blocks may store before another whose backward runs; the most of all."""
        before = [0] * len(self.models)
        most_ms = 0.0
        for index, block in enumerate(self.profile.blocks):
            least = self._least_outcomes[block.kind]
            if least.moments:
                _, base = EarlierBlocks().bases(self.profile, index, least)
                limit = nbytes - base - least.working_bytes
                most_ms = max(most_ms, least_ms(before, self.kinds.frontiers, limit))
            before[block.kind] += 1
        return most_ms + self.head_ms

    @cached_property
    def _least_outcomes(self) -> list[BlockOutcome]:
        return [least_outcome(kind, stored_bytes=0) for kind in self.profile.kinds]

    def _least_ms(self, limit_bytes: int) -> float:
        """What no policy can beat whose blocks store at most `limit_bytes`."""
        return least_ms(self.num_blocks, self.kinds.frontiers, limit_bytes) + self.head_ms

    def _limit_bytes(self, budget: Budget) -> int:
        """The most that blocks may store within the budget; more may be too much already."""
        if not budget.of_peak:
            return budget.nbytes - fixed_bytes(self.profile)
        # In the head what blocks store is live; in its forward also casts of parameters, stored or not.
        kinds = [self.profile.kind_of(block) for block in self.profile.blocks]
        cached = sum(value.nbytes for kind in kinds for value in kind.activations if value.cached)
        return budget.nbytes - max(EarlierBlocks(live_bytes=-cached).head_peaks(self.profile))

    def _greedy(self, fits: Fits, incumbent_ms: float) -> list[list[PricedPlan]]:
        """The first policy of the greedy rule that fits, if one does that is faster than `incumbent_ms`."""
        policies = greedy_policies(self.profile, self.models)
        faster = itertools.takewhile(lambda policy: self.rank(policy)[0] < incumbent_ms, policies)
        return list(itertools.islice(filter(fits, faster), 1))

    def _chained(
        self,
        columns: Sequence[Sequence[PricedPlan]],
        budget: Budget,
        fits: Fits,
        incumbent_ms: float,
        with_one_plans: bool = False,
    ) -> list[list[PricedPlan]]:
        """The fastest policy of the chain that fits, and what fits of the policies between it and the one before; of
        those with one plan per kind too, if asked for, and these alone if nothing of the chain fits."""
        before = self.plain
        for policy in self._chain(columns):
            if fits(policy):
                found = [policy]
                if policy != before:
                    found += self._between(columns, policy, before, budget, fits, incumbent_ms)
                    if with_one_plans:
                        found += self._one_plans(policy, before, budget, fits, self._least_rank(found, incumbent_ms))
                return found
            before = policy
        # The last of the chain stores least, and whatever its peak, one plan per kind may have a lower one.
        return list(self._one_plans(before, before, budget, fits, incumbent_ms)) if with_one_plans else []

    def _chain(self, columns: Sequence[Sequence[PricedPlan]]) -> Iterator[list[PricedPlan]]:
        return chain([block.kind for block in self.profile.blocks], columns)

    def _between(
        self,
        columns: Sequence[Sequence[PricedPlan]],
        low: list[PricedPlan],
        high: list[PricedPlan],
        budget: Budget,
        fits: Fits,
        incumbent_ms: float,
    ) -> list[list[PricedPlan]]:
        """The fastest that fits of policies that store more than `low` and less than `high`, which differ in one block.

        Only blocks of that block's kind change: more kinds to choose from take longer than they gain. The largest are
        tried first; what would be larger than the budget's limit is the same as what just is not, or does not fit.
        """
        changed = next(i for i, (left, right) in enumerate(zip(low, high, strict=True)) if left is not right)
        kind = self.profile.blocks[changed].kind
        low_bytes, high_bytes = self._stored(low), self._stored(high)
        steps = [low_bytes + (high_bytes - low_bytes) * step // (REFINEMENTS + 1) for step in range(1, REFINEMENTS + 1)]
        low_ms = self.rank(low)[0]
        caps = self._worth_trying(steps, budget, min(incumbent_ms, low_ms))
        if not caps:
            return []
        program = self._mixture(self._near(columns, kind, high), kind)
        policies = (policy for cap in reversed(caps) for policy in self._fastest(program, cap, low_ms))
        return list(itertools.islice(filter(fits, map(self.oracle.arranged, policies)), 1))

    def _one_plans(
        self, low: list[PricedPlan], high: list[PricedPlan], budget: Budget, fits: Fits, incumbent_ms: float
    ) -> Iterator[list[PricedPlan]]:
        """What fits of the fastest policies with one plan per kind, of any shape, for what they store: every percent of
        plain training's bytes from `low` to `high`, and beyond until some in a row do not fit. Where none can be
        faster than `incumbent_ms`, none is looked for.

        Where kinds have few blocks, they may be faster than mixtures, or need less while a block's backward runs.
        """
        whole = self.kinds.plain_stored_bytes
        first, last = -(-100 * self._stored(low) // whole), 100 * self._stored(high) // whole
        percents = {whole * percent // 100: percent for percent in range(first, 101)}
        missed: set[tuple[float, int]] = set()
        for cap in self._worth_trying(list(percents), budget, incumbent_ms):
            for policy in map(self.oracle.arranged, self._fastest(self._uniform, cap, incumbent_ms)):
                if fits(policy):
                    missed.clear()
                    incumbent_ms = self.rank(policy)[0]
                    yield policy
                elif percents[cap] > last:
                    missed.add(self.rank(policy))  # the same policy may be the fastest of many amounts
            if len(missed) == MISSES:
                return

    def _worth_trying(self, caps: Sequence[int], budget: Budget, incumbent_ms: float) -> list[int]:
        """Of rising amounts of stored bytes those whose fastest policies could fit and be faster than `incumbent_ms`.

        The fastest of an amount above the budget's limit either does not fit or is that of the first one above it.
        """
        outside = fixed_bytes(self.profile)
        read = sum(shared.nbytes for shared in self.profile.shared if not shared.saved)
        limit = self._limit_bytes(budget)
        num_within = sum(cap - outside - read < limit for cap in caps)
        return [cap for cap in caps[: num_within + 1] if self._least_ms(min(limit, cap - outside)) < incumbent_ms]

    def _fastest(self, program: MixtureProgram, cap_bytes: int, incumbent_ms: float) -> list[list[PricedPlan]]:
        """The fastest policy of `program` for what it stores, if it is no slower than `incumbent_ms` and one was
        found."""
        policy = program.least_ms(cap_bytes, incumbent_ms - self.head_ms)
        return [] if policy is None else [policy]

    def _near(
        self, columns: Sequence[Sequence[PricedPlan]], kind: int, policy: Sequence[PricedPlan]
    ) -> list[list[PricedPlan]]:
        """Of the frontier of `kind` the columns of `policy` and their neighbours, the others being far from worth their
        price; of the other frontiers the columns of `policy` alone."""
        used: list[set[PricedPlan]] = [set() for _ in columns]
        for block, column in zip(self.profile.blocks, policy, strict=True):
            used[block.kind].add(column)
        reach = [int(k == kind) for k in range(len(columns))]
        return [
            [c for i, c in enumerate(frontier) if used[k] & set(frontier[max(0, i - reach[k]) : i + reach[k] + 1])]
            for k, frontier in enumerate(columns)
        ]

    def _mixture(self, columns: Sequence[Sequence[PricedPlan]], kind: int) -> MixtureProgram:
        """Plans of the frontiers for all blocks but one of `kind`, which may have any."""
        num_free = [int(k == kind) for k in range(len(self.models))]
        return MixtureProgram(self.profile, self.models, columns, num_free, self.log)

    @cached_property
    def _uniform(self) -> MixtureProgram:
        """One plan of any shape for all blocks of a kind."""
        return MixtureProgram(self.profile, self.models, [[]] * len(self.models), self.num_blocks, self.log)

    def _stored(self, policy: Sequence[PricedPlan]) -> int:
        return stored_bytes(self.profile, policy)

    def rank(self, policy: Sequence[PricedPlan]) -> tuple[float, int]:
        """What decides between policies that fit: the time they cost, then what they store."""
        return (overhead_ms(policy) + self.head_ms, self._stored(policy))

    def _least_rank(self, policies: Sequence[Sequence[PricedPlan]], incumbent_ms: float = math.inf) -> float:
        """The least time of any of `policies`, or `incumbent_ms`."""
        return min([incumbent_ms, *(self.rank(policy)[0] for policy in policies)])


# What is said where nothing fits.


def _infeasible_stored(
    profile: Profile, config: AdaccConfig, budget: Budget, least: Sequence[PricedPlan], floor: int, plain: int
) -> InfeasibleBudgetError:
    fraction = math.ceil(floor / plain * 1e4) / 1e4
    outside = fixed_bytes(profile)
    return InfeasibleBudgetError(
        f"memory_budget={budget.given!r} allows {format_bytes(budget.nbytes)} of the {format_bytes(plain)} that plain "
        f"training stores for backward, and the least possible is {floor} bytes ({format_bytes(floor)}), a fraction of "
        f"{fraction:.4f}: {format_bytes(outside)} are stored outside the blocks ({profile.head} head) and "
        f"{format_bytes(floor - outside)} by the blocks with actions={config.actions!r}. Raise memory_budget, allow "
        f"more actions or codecs, or use a smaller batch",
        floor,
        least=policy_of_plans(profile, [column.plan for column in least], {}),
    )


def _infeasible_peak(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: Sequence[PricedPlan], bound: int
) -> InfeasibleBudgetError:
    outcome = simulate(profile, [column.plan for column in floor])
    needed = outcome.peak_bytes
    meant = f"{said}," if (said := what_was_meant(budget.nbytes)) else ""
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.given, str) else ""
    return InfeasibleBudgetError(
        f"memory_budget={budget.given!r}{origin}{meant} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with actions={config.actions!r} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences",
        needed,
        min(bound, needed),
        policy_of_plans(profile, [column.plan for column in floor], {}),
    )
