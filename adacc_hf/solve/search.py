"""Search for the fastest policy within a memory budget, for one output head.

The candidate policies do not depend on the budget, so a larger budget never gives a slower policy. Before each integer
program, a linear lower bound on the time (`frontier.least_ms`) is computed. The program is skipped if its solution
cannot be faster than the best policy so far.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.memory_simulator import EarlierBlocks
from adacc_hf.solve.baselines import greedy_policies
from adacc_hf.solve.budget_errors import infeasible_peak, infeasible_stored
from adacc_hf.solve.frontier import (
    MixtureProgram,
    chain,
    fixed_bytes,
    least_ms,
    lower_hull,
    overhead_ms,
    stored_bytes,
)
from adacc_hf.solve.kinds import Kinds
from adacc_hf.solve.milp import PricedPlan, retain_all
from adacc_hf.solve.minimum_peak import PeakOracle, least_bound, least_outcome, local_search

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.profile import Profile

    Fits = Callable[[list[PricedPlan]], bool]

NUM_REFINEMENTS = 4
"""Number of caps (limits on stored bytes) between two neighbouring policies of the chain.

The chain begins with the policy that retains everything. Each further policy differs from the previous one in one
block, and stores fewer bytes. The integer program is solved once per cap (10 to 30 ms). The caps are the same for every
budget between the two policies, so a larger budget never gives a slower policy.
"""
MAX_MISSES = 4
"""Number of policies in a row that may exceed the budget before the search for policies with one plan per kind stops.

A larger budget never tries fewer policies, because a policy that fits a smaller budget also fits the larger budget."""
NEAR_WORKING_SET = 0.1
"""Maximum excess of a plan's working set over the smallest working set, as a fraction of the smallest. Plans within
this limit are mixed to find fast policies near the least peak. The block's stored bytes are not part of its working
set."""
NUM_FRONTIER_ENDS = 4
"""Number of plans at the end of a frontier that are tried for all blocks of a kind to find a low peak.

Several are tried, because the last plans of a frontier replay so much that their working set grows again."""


class PolicySearch:
    """Search for the fastest policy of a profile under one config, with the profile's head (output layer and loss)."""

    def __init__(self, profile: Profile, config: AdaccConfig, kinds: Kinds) -> None:
        self.profile = profile
        self.config = config
        self.kinds = kinds
        self.log = kinds.log
        self.models = kinds.models
        self.oracle = PeakOracle(profile, kinds.outcomes)
        self.retain_plans = [retain_all(model) for model in self.models]
        self.plain = [self.retain_plans[block.kind] for block in profile.blocks]
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_blocks = [blocks[kind] for kind in range(len(self.models))]
        """Number of blocks of each kind."""
        self.head_ms = profile.head_overhead_ms
        """Extra time in ms of the profile's head compared to the plain head."""
        self.fixed_ms = self.head_ms + sum(profile.kind_of(block).extra_ms for block in profile.blocks)
        """Extra time in ms of every policy of this search: the time of the head, and of modules that run in tiles of
        rows."""
        self._proven_ms: float | None = None

    def within(self, budget: Budget, incumbent_ms: float = math.inf) -> list[PricedPlan] | None:
        """Return the plans of the fastest policy within the budget, one plan per block.

        `incumbent_ms` is the time of the best policy found so far with another output head. A policy that is not faster
        is not needed, and the search for it may end early. The result is then None, or a slower policy within the
        budget.

        Raise InfeasibleBudgetError if no policy fits the budget, unless the search has ended early.
        """
        find = self._within_peak if budget.limits_peak else self._within_stored
        policies = find(budget, incumbent_ms)
        return min(policies, key=self.rank, default=None)

    def _within_stored(self, budget: Budget, incumbent_ms: float) -> list[list[PricedPlan]]:
        """Return candidates for the fastest policy that stores at most the budget's bytes."""
        if self._stored_bytes(self.plain) <= budget.nbytes:
            return [self.plain]
        least = self.uniform_program.least_bytes()
        if self._stored_bytes(least) > budget.nbytes:
            plain_bytes = self.kinds.plain_stored_bytes
            raise infeasible_stored(self.profile, self.config, budget, least, self._stored_bytes(least), plain_bytes)
        frontiers = self.kinds.frontiers

        def fits(policy: list[PricedPlan]) -> bool:
            return self._fits_host(policy) and self._stored_bytes(policy) <= budget.nbytes

        policies = [least]
        if len(self.models) > 1:
            policies += self._chain_policies(frontiers, budget, fits, incumbent_ms)
        else:
            policies += itertools.islice(filter(fits, self._chain(frontiers)), 1)
            program = self._mixture_program(frontiers, 0)
            policies += self._fastest(program, budget.nbytes, self._least_ms_of(policies, incumbent_ms))
        # A policy with one plan per kind may not be a mixture of frontier plans, and may be faster if kinds have few
        # blocks.
        policies += self._fastest(self.uniform_program, budget.nbytes, self._least_ms_of(policies, incumbent_ms))
        if len(self.plain) == 1 and not self.log.num_unproven:
            # The program's gap is relative to the time of the blocks.
            blocks_ms = self._least_ms_of(policies, incumbent_ms) - self.head_ms
            self._proven_ms = (1 - self.log.worst_gap) * blocks_ms + self.head_ms
        policies += self._greedy(fits, self._least_ms_of(policies, incumbent_ms))
        return [self.oracle.sort_for_peak(policy) for policy in policies]

    def _within_peak(self, budget: Budget, incumbent_ms: float) -> list[list[PricedPlan]]:
        """Return candidates for the fastest policy whose peak in a step is at most the budget."""
        if self.oracle.peak_bytes(self.plain) <= budget.nbytes:
            return [self.plain]
        if all(peak > budget.nbytes for peak in self._falling_peaks()):
            frontiers = self._byte_search.kinds.frontiers
            least, bound = self._timed(self._byte_search.least), least_bound(self.profile, frontiers)
            raise infeasible_peak(self.profile, self.config, budget, least, bound)
        frontiers = self.kinds.frontiers
        fits = self._fits_peak(budget)
        policies = list(self._chain_policies(frontiers, budget, fits, incumbent_ms, with_uniform=True))
        if policies:
            policies += self._greedy(fits, self._least_ms_of(policies, incumbent_ms))
        if self._least_ms_of(policies, incumbent_ms) <= self.bound_ms(self._reachable_budget(frontiers)):
            return policies
        start = self.start
        start_bytes = self.oracle.peak_bytes(start)
        if start_bytes <= budget.nbytes:
            policies = [start, *(policies or self._greedy(fits, incumbent_ms))]
        # The policies below the frontiers' least peak are candidates for larger budgets too if one of them could be the
        # fastest. Otherwise more memory could cost time.
        start_budget = Budget(start_bytes, start_bytes, limits_peak=True)
        if self._least_ms_of(policies, incumbent_ms) > self.bound_ms(start_budget):
            # The last policy is a candidate for every budget, like the others: it may be the fastest one too.
            others = map(self._timed, [*self._byte_search.trail, self._byte_search.least])
            policies += (policy for policy in others if fits(policy) and self.oracle.peak_bytes(policy) < start_bytes)
        policies += itertools.islice(filter(fits, self._chain(self._low_peak_frontiers)), 1)
        return policies

    def _working_bytes(self, kind: int, plan: PricedPlan) -> int:
        """Return the peak of a block's backward, without the bytes that the block stores."""
        outcome = self.oracle.outcome(kind, plan)
        return outcome.working_bytes - outcome.stored_bytes

    @cached_property
    def _low_peak_frontiers(self) -> list[list[PricedPlan]]:
        """Frontier of each kind of block, from plans whose working set is near that of the policy with the least peak.
        The plans on a kind's own frontier are selected by stored bytes. The plan with the least peak may store more, so
        that no mixture of frontier plans is near it."""
        least = self._timed(self._byte_search.least)
        plans: list[list[PricedPlan]] = [[] for _ in self.models]
        for block, plan in zip(self.profile.blocks, least, strict=True):
            plans[block.kind].append(plan)
        frontiers = []
        for kind, (own_plans, extended) in enumerate(zip(plans, self.kinds.extended, strict=True)):
            working = {plan: self._working_bytes(kind, plan) for plan in (*own_plans, *extended)}
            limit = (1 + NEAR_WORKING_SET) * min((working[plan] for plan in own_plans), default=0)
            near = [plan for plan in extended if working[plan] <= limit]
            frontiers.append(lower_hull([*own_plans[:1], *near]) or extended[-1:])
        return frontiers

    # The least peak must be the same in each process, so that a budget that one process could use can be used again.
    # Therefore it comes from a search with prices in bytes, whose policies do not depend on measured times.

    @cached_property
    def _byte_search(self) -> PolicySearch:
        """Copy of this search whose times are computed from bytes. The least peak that the copy finds does not depend
        on measured times."""
        search = PolicySearch(self.profile, self.config, self.kinds.by_bytes)
        search.head_ms = search.fixed_ms = 0.0
        return search

    def _timed(self, policy: Sequence[PricedPlan]) -> list[PricedPlan]:
        """Return a copy of `policy`, a result of `_byte_search`, whose plans have measured times."""
        blocks = zip(self.profile.blocks, policy, strict=True)
        return [replace(plan, ms=self.oracle.outcome(block.kind, plan).overhead_ms) for block, plan in blocks]

    def _falling_peaks(self) -> Iterator[int]:
        """Yield peaks of policies that this search can find: the quickest to compute first, the least peak last. A
        budget is feasible if the least peak fits, even if a faster search finds no policy."""
        checkpointed = [
            (*model.checkpoints, plain)[0] for model, plain in zip(self.models, self.retain_plans, strict=True)
        ]
        yield self.oracle.peak_bytes([checkpointed[block.kind] for block in self.profile.blocks])
        yield self.quick_peak_bytes
        yield self.oracle.peak_bytes(self._byte_search.trail[-1])
        yield self.least_peak_bytes

    @property
    def quick_peak_bytes(self) -> int:
        """Upper bound on the least peak, computed without a local search."""
        return min(self.oracle.peak_bytes(policy) for policy in (self.plain, self._byte_search.start))

    @property
    def least_peak_bytes(self) -> int:
        """Least peak among the policies that this search can find, whatever the budget and the measured times."""
        return self.oracle.peak_bytes(self._byte_search.least)

    @cached_property
    def start(self) -> list[PricedPlan]:
        """Start of the local search: the policy of frontier plans and checkpointed plans with the least peak."""
        return self.oracle.least_peak(self.kinds.extended)

    @cached_property
    def trail(self) -> list[list[PricedPlan]]:
        """Policies with falling peaks, from the local search."""
        return local_search(self.oracle, self.models, self.kinds.extended, self.start)

    @cached_property
    def least(self) -> list[PricedPlan]:
        """Policy with the lowest peak that this search finds: by local search, mixtures, and the greedy rule."""
        return self._least_peak(self.kinds.frontiers, self.trail[-1])

    def _least_peak(self, frontiers: Sequence[Sequence[PricedPlan]], policy: list[PricedPlan]) -> list[PricedPlan]:
        """Search repeatedly for a policy with a lower peak, starting from `policy`. Return the policy with the lowest
        peak found."""
        while True:
            nbytes = self.oracle.peak_bytes(policy) - 1
            budget = Budget(nbytes, nbytes, limits_peak=True)
            fits = self._fits_peak(budget)
            others = self._chain_policies(frontiers, budget, fits, math.inf, with_uniform=True)
            others += self._greedy(fits, math.inf)
            if not others:
                return policy
            policy = min(others, key=self.oracle.peak_bytes)

    def _fits_peak(self, budget: Budget) -> Fits:
        limit = self._limit_bytes(budget)

        def fits(policy: list[PricedPlan]) -> bool:
            # The sum rules out policies that are far too large without a simulation.
            return (
                self._fits_host(policy)
                and sum(c.nbytes for c in policy) <= limit
                and self.oracle.peak_bytes(policy) <= budget.nbytes
            )

        return fits

    def least_bytes_bound(self, budget: Budget) -> int:
        """Return a lower bound on the peak, or on the stored bytes, of all policies: whichever `budget` limits."""
        if budget.limits_peak:
            return least_bound(self.profile, self._byte_search.kinds.frontiers)
        return self._stored_bytes(self.uniform_program.least_bytes())

    def _fits_host(self, policy: list[PricedPlan]) -> bool:
        blocks = zip(self.profile.blocks, policy, strict=True)
        return all(self.models[block.kind].fits_host(plan.host_bytes) for block, plan in blocks)

    def _reachable_budget(self, frontiers: Sequence[Sequence[PricedPlan]]) -> Budget:
        """Return a peak budget that some policy with plans of `frontiers` fits. The budget is quick to compute, but is
        not the smallest budget that a policy fits."""
        backs = range(1, NUM_FRONTIER_ENDS + 1)
        ends = ([frontier[max(-back, -len(frontier))] for frontier in frontiers] for back in backs)
        policies = ([end[block.kind] for block in self.profile.blocks] for end in ends)
        nbytes = min(self.oracle.peak_bytes(policy) for policy in policies)
        return Budget(nbytes, nbytes, limits_peak=True)

    def bound_ms(self, budget: Budget) -> float:
        """Return a lower bound on the overhead in ms of any policy within the budget.

        The bound is accurate to `frontier.SLOPE_TOLERANCE`. Return infinity if no policy can fit.
        """
        if self._proven_ms is not None:
            return self._proven_ms
        in_head_ms = self._least_ms(self._limit_bytes(budget))
        return max(in_head_ms, self._backward_ms(budget.nbytes)) if budget.limits_peak else in_head_ms

    def _backward_ms(self, nbytes: int) -> float:
        """Return a lower bound on the overhead in ms of any policy whose backward has a peak of at most `nbytes`. While
        the backward of a block runs, the remaining memory limits the bytes that the earlier blocks store. Each block
        gives a bound, and the result is the largest of these bounds."""
        num_earlier = [0] * len(self.models)
        bound_ms = 0.0
        for index, block in enumerate(self.profile.blocks):
            least = self._least_outcomes[block.kind]
            if least.moments:
                _, base = EarlierBlocks().base_bytes(self.profile, index, least)
                limit = nbytes - base - least.working_bytes
                bound_ms = max(bound_ms, least_ms(num_earlier, self.kinds.frontiers, limit))
            num_earlier[block.kind] += 1
        return bound_ms + self.fixed_ms

    @cached_property
    def _least_outcomes(self) -> list[BlockOutcome]:
        return [least_outcome(kind, stored_bytes=0) for kind in self.profile.kinds]

    def _least_ms(self, limit_bytes: int) -> float:
        """Return a lower bound on the overhead in ms of any policy whose blocks store at most `limit_bytes`."""
        return least_ms(self.num_blocks, self.kinds.frontiers, limit_bytes) + self.fixed_ms

    def _limit_bytes(self, budget: Budget) -> int:
        """Return the maximum number of bytes that all blocks together can store if a policy fits the budget."""
        if not budget.limits_peak:
            return budget.nbytes - fixed_bytes(self.profile)
        # While the head runs, all bytes that blocks store are live. In its forward, autocast's cached casts of
        # parameters are live too, whether or not they are stored.
        kinds = [self.profile.kind_of(block) for block in self.profile.blocks]
        cast_bytes = sum(value.nbytes for kind in kinds for value in kind.activations if value.cached)
        return budget.nbytes - max(EarlierBlocks(live_bytes=-cast_bytes).head_peaks(self.profile))

    def _greedy(self, fits: Fits, incumbent_ms: float) -> list[list[PricedPlan]]:
        """Return a list with the first of `greedy_policies` that fits. The list is empty if no policy fits that takes
        less time than `incumbent_ms`."""
        policies = greedy_policies(self.profile, self.models)
        faster = itertools.takewhile(lambda policy: self.rank(policy)[0] < incumbent_ms, policies)
        return list(itertools.islice(filter(fits, faster), 1))

    def _chain_policies(
        self,
        frontiers: Sequence[Sequence[PricedPlan]],
        budget: Budget,
        fits: Fits,
        incumbent_ms: float,
        with_uniform: bool = False,
    ) -> list[list[PricedPlan]]:
        """Return, from a chain of policies that begins with retaining everything and in which each policy changes one
        block's plan to store less, the fastest one that fits, then those that store more than it and less than the one
        before it, which does not fit. If `with_uniform`, add policies with one plan per kind of block."""
        before = self.plain
        for policy in self._chain(frontiers):
            if fits(policy):
                policies = [policy]
                if policy != before:
                    policies += self._refined_policies(frontiers, policy, before, budget, fits, incumbent_ms)
                    if with_uniform:
                        fastest_ms = self._least_ms_of(policies, incumbent_ms)
                        policies += self.uniform_policies(policy, before, budget, fits, fastest_ms)
                return policies
            before = policy
        # The last policy of the chain stores least, but a policy with one plan per kind may have a lower peak.
        return list(self.uniform_policies(before, before, budget, fits, incumbent_ms)) if with_uniform else []

    def _chain(self, frontiers: Sequence[Sequence[PricedPlan]]) -> Iterator[list[PricedPlan]]:
        return chain([block.kind for block in self.profile.blocks], frontiers)

    def _refined_policies(
        self,
        frontiers: Sequence[Sequence[PricedPlan]],
        low: list[PricedPlan],
        high: list[PricedPlan],
        budget: Budget,
        fits: Fits,
        incumbent_ms: float,
    ) -> list[list[PricedPlan]]:
        """Return a list with the fastest policy found between `low` and `high`, which differ in one block, or an empty
        list. Only plans of this block's kind are changed. The solver runs for a few evenly spaced limits of stored
        bytes, the largest first, until a policy fits."""
        index = next(i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a is not b)
        kind = self.profile.blocks[index].kind
        low_bytes, high_bytes = self._stored_bytes(low), self._stored_bytes(high)
        num_steps = NUM_REFINEMENTS + 1
        steps = [low_bytes + (high_bytes - low_bytes) * step // num_steps for step in range(1, num_steps)]
        low_ms = self.rank(low)[0]
        caps = self._promising_caps(steps, budget, min(incumbent_ms, low_ms))
        if not caps:
            return []
        program = self._mixture_program(self._neighboring_plans(frontiers, kind, high), kind)
        policies = (policy for cap in reversed(caps) for policy in self._fastest(program, cap, low_ms))
        return list(itertools.islice(filter(fits, map(self.oracle.sort_for_peak, policies)), 1))

    def uniform_policies(
        self, low: list[PricedPlan], high: list[PricedPlan], budget: Budget, fits: Fits, incumbent_ms: float
    ) -> Iterator[list[PricedPlan]]:
        """Yield policies that fit the budget and have one plan per kind of block: for each cap (limit on stored bytes),
        the fastest.

        The caps rise by one percent of plain training's stored bytes, from the bytes of the policy `low` to the bytes
        of the policy `high`. Larger caps follow until `MAX_MISSES` policies in a row do not fit. Caps whose policies
        cannot be faster than `incumbent_ms` are skipped.

        If kinds have few blocks, policies with one plan per kind may be faster than mixtures, or need less memory while
        a block's backward runs.
        """
        plain_bytes = self.kinds.plain_stored_bytes
        first, last = -(-100 * self._stored_bytes(low) // plain_bytes), 100 * self._stored_bytes(high) // plain_bytes
        percents = {plain_bytes * percent // 100: percent for percent in range(first, 101)}
        misses: set[tuple[float, int]] = set()
        for cap in self._promising_caps(list(percents), budget, incumbent_ms):
            for policy in map(self.oracle.sort_for_peak, self._fastest(self.uniform_program, cap, incumbent_ms)):
                if fits(policy):
                    misses.clear()
                    incumbent_ms = self.rank(policy)[0]
                    yield policy
                elif percents[cap] > last:
                    misses.add(self.rank(policy))  # the same policy may be the fastest one for many caps
            if len(misses) == MAX_MISSES:
                return

    def _promising_caps(self, caps: Sequence[int], budget: Budget, incumbent_ms: float) -> list[int]:
        """Return the caps (limits on stored bytes) whose fastest policy could fit and be faster than `incumbent_ms`.
        `caps` is in ascending order. Of the caps above the budget's limit, only the first can be returned, because a
        larger cap gives the same policy, or a policy that does not fit."""
        outside = fixed_bytes(self.profile)
        unsaved_shared = sum(shared.nbytes for shared in self.profile.shared if not shared.saved)
        limit = self._limit_bytes(budget)
        num_within = sum(cap - outside - unsaved_shared < limit for cap in caps)
        return [cap for cap in caps[: num_within + 1] if self._least_ms(min(limit, cap - outside)) < incumbent_ms]

    def _fastest(self, program: MixtureProgram, cap_bytes: int, incumbent_ms: float) -> list[list[PricedPlan]]:
        """Return a list with the fastest policy of `program` that stores at most `cap_bytes`. The list is empty if no
        such policy is found that takes at most `incumbent_ms`."""
        policy = program.least_ms(cap_bytes, incumbent_ms - self.head_ms)
        return [] if policy is None else [policy]

    def _neighboring_plans(
        self, frontiers: Sequence[Sequence[PricedPlan]], kind: int, policy: Sequence[PricedPlan]
    ) -> list[list[PricedPlan]]:
        """Return `frontiers` with only the plans that `policy` uses and, for `kind`, the plans next to them. Plans
        farther along the frontier of `kind` take too much time for the bytes that they free."""
        used: list[set[PricedPlan]] = [set() for _ in frontiers]
        for block, plan in zip(self.profile.blocks, policy, strict=True):
            used[block.kind].add(plan)
        reach = [int(k == kind) for k in range(len(frontiers))]
        return [
            [c for i, c in enumerate(frontier) if used[k] & set(frontier[max(0, i - reach[k]) : i + reach[k] + 1])]
            for k, frontier in enumerate(frontiers)
        ]

    def _mixture_program(self, frontiers: Sequence[Sequence[PricedPlan]], kind: int) -> MixtureProgram:
        """Return the integer program in which one block of `kind` may have any plan. Every other block gets a plan from
        `frontiers`."""
        num_free = [int(k == kind) for k in range(len(self.models))]
        return MixtureProgram(self.profile, self.models, frontiers, num_free, self.log)

    @cached_property
    def uniform_program(self) -> MixtureProgram:
        """Integer program that chooses one plan per kind of block. The chosen plans need not be on the frontier."""
        return MixtureProgram(self.profile, self.models, [[]] * len(self.models), self.num_blocks, self.log)

    def _stored_bytes(self, policy: Sequence[PricedPlan]) -> int:
        return stored_bytes(self.profile, policy)

    def rank(self, policy: Sequence[PricedPlan]) -> tuple[float, int]:
        """Return the sort key of a policy that fits the budget: the extra time in ms, then the stored bytes."""
        return (overhead_ms(policy) + self.head_ms, self._stored_bytes(policy))

    def _least_ms_of(self, policies: Sequence[Sequence[PricedPlan]], incumbent_ms: float = math.inf) -> float:
        return min([incumbent_ms, *(self.rank(policy)[0] for policy in policies)])
