"""The policy maker (paper, section 3.3): the fastest policy within a memory budget.

How it goes: `frontiers` finds for each kind of block the plans worth mixing, once for all budgets. With one kind, a
budget on stored bytes is then one integer program (`MixtureProgram`). A budget on the peak of the step, or for several
kinds, is met by the first policy of the `chain` from all RETAIN to the least bytes that fits, refined with the same
program. The frontiers also bound what any policy can do: how far the best one found may lie above that is its `gap`.
Every policy is simulated at the end, in whole bytes, by code that shares nothing with the program.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from adacc_hf.config import AdaccConfig, check_memory_budget
from adacc_hf.errors import InfeasibleBudgetError
from adacc_hf.floor import descent, least_bound
from adacc_hf.frontier import chain, frontiers, least_ms
from adacc_hf.greedy import greedy_policies
from adacc_hf.milp import Column, KindModel, build_model, retain_all
from adacc_hf.mixture import MixtureProgram, fixed_bytes, overhead_ms, stored_bytes
from adacc_hf.peak import PeakOracle
from adacc_hf.policy import Policy
from adacc_hf.program import SolverLog
from adacc_hf.simulator import simulate
from adacc_hf.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from adacc_hf.peak import Outcomes
    from adacc_hf.profile import Profile

REFINEMENTS = 4
"""Amounts of stored bytes tried between two policies of the chain, which differ in one block: the same for every budget
between them, so that more memory never costs time. Each is a run of HiGHS (10 to 30 ms)."""
MISSES = 4
"""Policies with one plan per kind that may be too large in a row before no larger one is tried. A larger budget never
tries fewer: what fits the smaller one fits it too."""


@dataclass(frozen=True)
class Budget:
    """A memory budget in bytes."""

    given: str | float | int
    nbytes: int
    of_peak: bool
    """Whether it bounds the peak of the step; else it bounds what is stored for backward."""

    @classmethod
    def resolve(cls, given: str | float | int, profile: Profile, config: AdaccConfig) -> Budget:
        """Raises ValueError unless `given` is one of the forms that `AdaccConfig.memory_budget` describes."""
        check_memory_budget(given)
        if isinstance(given, float):
            # The factor makes up for rounding: (n / plain) * plain must not come out below n.
            return cls(given, int(given * profile.plain_stored_bytes * (1 + 4e-16)), of_peak=False)
        if given == "auto":
            return cls(given, int(profile.available_bytes * (1 - config.memory_margin)), of_peak=True)
        return cls(given, parse_bytes(given, "memory_budget") if isinstance(given, str) else given, of_peak=True)


def solve_policy(
    profile: Profile, memory_budget: str | float | int | None = None, config: AdaccConfig | None = None
) -> Policy:
    """The fastest policy whose memory keeps to `memory_budget` (default: the config's).

    All RETAIN if that fits. Raises InfeasibleBudgetError, with the smallest budget that would do, if nothing fits, and
    ValueError for a budget in no known form, or if the profile has no head that the config allows.
    """
    started = time.perf_counter()
    config = config or AdaccConfig()
    budget = Budget.resolve(config.memory_budget if memory_budget is None else memory_budget, profile, config)
    searches = _searches(profile, config)
    search, columns = _fastest(searches, budget)
    gap = 0.0 if columns is searches[0].plain else _gap(searches, search.rank(columns)[0], budget)
    facts = {
        "memory_budget": budget.given,
        "budget_bytes": budget.nbytes,
        "budget_of": "peak" if budget.of_peak else "stored",
        "status": "plain" if columns is searches[0].plain else "optimal" if gap <= config.solver_gap else "feasible",
        "gap": gap,
        "solves": search.log.num_solves,
        "seconds": time.perf_counter() - started,
    }
    policy = Policy.build(search.profile, [column.plan for column in columns], facts)
    needed = policy.predicted_peak_bytes if budget.of_peak else policy.predicted_stored_bytes
    assert needed <= budget.nbytes, f"the solver's policy needs {needed} bytes of {budget.nbytes}"
    return policy


def _searches(profile: Profile, config: AdaccConfig) -> list[_Search]:
    """A search for each head that may be chosen, the plain one first."""
    heads = [name for name in config.heads if name in profile.heads] or config.heads[:1]
    kinds = _Kinds(profile, config)
    return [_Search(profile.with_head(name), config, kinds) for name in heads]


def _fastest(searches: Sequence[_Search], budget: Budget) -> tuple[_Search, list[Column]]:
    """The fastest policy within the budget, with the search that found it. Raises InfeasibleBudgetError."""
    found: list[tuple[_Search, list[Column]]] = []
    errors: list[InfeasibleBudgetError] = []
    for search in searches:
        if found and search.bound_ms(budget) >= min(other.rank(columns)[0] for other, columns in found):
            continue
        try:
            columns = search.within(budget)
        except InfeasibleBudgetError as error:
            errors.append(error)
            continue
        if columns is search.plain and search is searches[0]:
            return search, columns
        found.append((search, columns))
    if not found:
        raise _with_bound(errors)
    return min(found, key=lambda pair: pair[0].rank(pair[1]))


def _with_bound(errors: Sequence[InfeasibleBudgetError]) -> InfeasibleBudgetError:
    """The error of the head with the lowest floor, and how far below it any policy with any head may come."""
    least = min(errors, key=lambda error: error.smallest_budget_bytes)
    floor, bound = least.smallest_budget_bytes, min(error.bound_bytes for error in errors)
    if bound >= floor:
        return InfeasibleBudgetError(str(least), floor)
    percent = 100 * (1 - bound / floor)
    return InfeasibleBudgetError(
        f"{least}. It is the least of all policies that were tried; no policy needs less than {bound} bytes "
        f"({format_bytes(bound)}, {percent:.2g} % below)",
        floor,
        bound,
    )


def _gap(searches: Sequence[_Search], ms: float, budget: Budget) -> float:
    """Part of a policy's overhead by which the best policy within the budget, with any head, may be faster."""
    bound_ms = min(search.bound_ms(budget) for search in searches)
    return max(0.0, 1 - bound_ms / ms) if ms else 0.0


class _Kinds:
    """The programs of a profile's kinds, and their frontiers, which depend on neither head nor budget."""

    def __init__(self, profile: Profile, config: AdaccConfig) -> None:
        self.plain_stored_bytes = profile.plain_stored_bytes
        """What fractions are fractions of, whatever the head."""
        self.log = SolverLog(gap=config.solver_gap, seconds=config.solver_seconds)
        self.models: list[KindModel] = [build_model(kind, config) for kind in profile.kinds]
        self.outcomes: Outcomes = {}

    @cached_property
    def frontiers(self) -> list[list[Column]]:
        return frontiers(self.log, self.models)


class _Search:
    """The search for one profile and config. No candidate depends on the budget: a larger one never costs more."""

    def __init__(self, profile: Profile, config: AdaccConfig, kinds: _Kinds) -> None:
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
        self._proven_ms: float | None = None

    def within(self, budget: Budget) -> list[Column]:
        """The plan of each block. Raises InfeasibleBudgetError."""
        if budget.of_peak:
            return self._within_peak(budget)
        return self._within_stored(budget)

    def _within_stored(self, budget: Budget) -> list[Column]:
        if self._stored(self.plain) <= budget.nbytes:
            return self.plain
        least = self._uniform().least_bytes()
        if self._stored(least) > budget.nbytes:
            plain_bytes = self.kinds.plain_stored_bytes
            raise _infeasible_stored(self.profile, self.config, budget, self._stored(least), plain_bytes)
        columns = self.kinds.frontiers
        if len(self.models) > 1:
            found = list(self._chained(columns, lambda policy: self._stored(policy) <= budget.nbytes))
            programs = [self._uniform()]
        else:
            found = []
            programs = [self._mixture(columns, 0), self._uniform()]
        # One plan per kind may be no mixture of the frontiers, and faster where kinds have few blocks.
        found += [policy for program in programs if (policy := program.least_ms(budget.nbytes)) is not None]
        if len(self.plain) == 1 and not self.log.num_unproven:
            self._proven_ms = (1 - self.log.worst_gap) * min(self.rank(policy)[0] for policy in [least, *found])
        greedy = self._greedy(lambda policy: self._stored(policy) <= budget.nbytes)
        return self.oracle.arranged(min([least, *found, *greedy], key=self.rank))

    def _within_peak(self, budget: Budget) -> list[Column]:
        if self.oracle.peak_bytes(self.plain) <= budget.nbytes:
            return self.plain
        columns = self.kinds.frontiers
        start = self.oracle.least_peak(columns)
        start_bytes = self.oracle.peak_bytes(start)
        limit = self._limit_bytes(budget)

        def fits(policy: list[Column]) -> bool:
            # The sum first, which takes no simulation of plans that are far too large.
            return sum(c.nbytes for c in policy) <= limit and self.oracle.peak_bytes(policy) <= budget.nbytes

        found = []
        if start_bytes <= budget.nbytes:
            found = [start, *self._chained(columns, fits, with_one_plans=True), *self._greedy(fits)]
        # Policies below the frontiers' least peak are looked for where one could be the best: at larger budgets too,
        # or more memory could cost time.
        below = Budget(start_bytes, start_bytes, of_peak=True)
        if not found or min(map(self.rank, found))[0] > self.bound_ms(below):
            trail = descent(self.oracle, self.models, columns, start)
            found += filter(fits, trail)
            if not found:
                bound = least_bound(self.profile, columns)
                raise _infeasible_peak(self.profile, self.config, budget, trail[-1], bound)
        return min(found, key=self.rank)

    def bound_ms(self, budget: Budget) -> float:
        """What no policy within the budget can beat, to `frontier.TOLERANCE`; infinity if none can fit."""
        if self._proven_ms is not None:
            return self._proven_ms
        return self._least_ms(self._limit_bytes(budget))

    def _least_ms(self, limit_bytes: int) -> float:
        """What no policy can beat whose blocks store at most `limit_bytes`."""
        return least_ms(self.num_blocks, self.kinds.frontiers, limit_bytes) + self.profile.head_overhead_ms

    def _limit_bytes(self, budget: Budget) -> int:
        """The most that blocks may store within the budget; more may be too much already."""
        if not budget.of_peak:
            return budget.nbytes - fixed_bytes(self.profile)
        # In the head what blocks store is live; in its forward also casts of parameters, stored or not.
        kinds = [self.profile.kind_of(block) for block in self.profile.blocks]
        cached = sum(value.nbytes for kind in kinds for value in kind.activations if value.cached)
        outside, loss = self.profile.head_peaks(frozenset())
        return budget.nbytes - max(outside - cached, loss)

    def _greedy(self, fits: Callable[[list[Column]], bool]) -> list[list[Column]]:
        """The first policy of the greedy rule that fits, if one does."""
        return list(itertools.islice(filter(fits, greedy_policies(self.profile, self.models)), 1))

    def _chained(
        self, columns: Sequence[Sequence[Column]], fits: Callable[[list[Column]], bool], with_one_plans: bool = False
    ) -> Iterator[list[Column]]:
        """The fastest policy of the chain that fits, and what fits of the policies between it and the one before; of
        those with one plan per kind too, if asked for."""
        before = self.plain
        for policy in chain([block.kind for block in self.profile.blocks], columns):
            if fits(policy):
                yield policy
                if policy != before:
                    yield from filter(fits, self._between(columns, policy, before))
                    if with_one_plans:
                        yield from self._one_plans(policy, before, fits)
                return
            before = policy

    def _between(
        self, columns: Sequence[Sequence[Column]], low: list[Column], high: list[Column]
    ) -> Iterator[list[Column]]:
        """Policies that store more than `low` and less than `high`, which differ in one block.

        Only blocks of that block's kind change: more kinds to choose from take longer than they gain.
        """
        changed = next(i for i, (left, right) in enumerate(zip(low, high, strict=True)) if left is not right)
        kind = self.profile.blocks[changed].kind
        program = self._mixture(self._near(columns, kind, high), kind)
        low_bytes, high_bytes = self._stored(low), self._stored(high)
        for step in range(1, REFINEMENTS + 1):
            policy = program.least_ms(low_bytes + (high_bytes - low_bytes) * step // (REFINEMENTS + 1))
            if policy is not None:
                yield self.oracle.arranged(policy)

    def _one_plans(
        self, low: list[Column], high: list[Column], fits: Callable[[list[Column]], bool]
    ) -> Iterator[list[Column]]:
        """What fits of the fastest policies with one plan per kind, of any shape, for what they store: every percent of
        plain training's bytes from `low` to `high`, and beyond until some in a row do not fit. Where none can be
        faster than `low`, none is looked for.

        Where kinds have few blocks, they may be faster than mixtures, or need less while a block's backward runs.
        """
        whole, outside = self.kinds.plain_stored_bytes, fixed_bytes(self.profile)
        last = 100 * self._stored(high) // whole
        program, misses, low_ms = self._uniform(), 0, self.rank(low)[0]
        for percent in range(-(-100 * self._stored(low) // whole), 101):
            if self._least_ms(whole * percent // 100 - outside) >= low_ms:
                continue
            policy = program.least_ms(whole * percent // 100)
            is_fitting = policy is not None and fits(arranged := self.oracle.arranged(policy))
            misses = 0 if is_fitting or percent <= last else misses + 1
            if is_fitting:
                yield arranged
            elif misses == MISSES:
                return

    def _near(self, columns: Sequence[Sequence[Column]], kind: int, policy: Sequence[Column]) -> list[list[Column]]:
        """Of the frontier of `kind` the columns of `policy` and their neighbours, the others being far from worth their
        price; of the other frontiers the columns of `policy` alone."""
        used: list[set[Column]] = [set() for _ in columns]
        for block, column in zip(self.profile.blocks, policy, strict=True):
            used[block.kind].add(column)
        reach = [int(k == kind) for k in range(len(columns))]
        return [
            [c for i, c in enumerate(frontier) if used[k] & set(frontier[max(0, i - reach[k]) : i + reach[k] + 1])]
            for k, frontier in enumerate(columns)
        ]

    def _mixture(self, columns: Sequence[Sequence[Column]], kind: int) -> MixtureProgram:
        """Plans of the frontiers for all blocks but one of `kind`, which may have any."""
        num_free = [int(k == kind) for k in range(len(self.models))]
        return MixtureProgram(self.profile, self.models, columns, num_free, self.log)

    def _uniform(self) -> MixtureProgram:
        """One plan of any shape for all blocks of a kind."""
        return MixtureProgram(self.profile, self.models, [[]] * len(self.models), self.num_blocks, self.log)

    def _stored(self, policy: Sequence[Column]) -> int:
        return stored_bytes(self.profile, policy)

    def rank(self, policy: Sequence[Column]) -> tuple[float, int]:
        """What decides between policies that fit: the time they cost, then what they store."""
        return (overhead_ms(policy) + self.profile.head_overhead_ms, self._stored(policy))


def _infeasible_stored(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: int, plain: int
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
    )


def _infeasible_peak(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: list[Column], bound: int
) -> InfeasibleBudgetError:
    outcome = simulate(profile, [column.plan for column in floor])
    needed = outcome.peak_bytes
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.given, str) else ""
    return InfeasibleBudgetError(
        f"memory_budget={budget.given!r}{origin} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with actions={config.actions!r} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences",
        needed,
        min(bound, needed),
    )
