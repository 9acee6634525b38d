"""Search for policies with a low peak: assignment of plans to the blocks of a step, and a lower bound on the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.memory_simulator import EarlierBlocks, step_peak_bytes
from adacc_hf.artifacts.policy import RECOMPUTE
from adacc_hf.solve.milp import KindModel, PricedPlan, price

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import Profile

    Outcomes = Sequence[dict[Plan, BlockOutcome]]
    Pools = dict[frozenset[int], list[tuple[PricedPlan, BlockOutcome]]]
    from adacc_hf.artifacts.kind_profile import KindProfile

    _Needs = tuple[tuple[int, ...], frozenset[int]]


class PeakOracle:
    """Predictor of the memory of plans and policies, which simulates them. The outcome of each plan is cached."""

    def __init__(self, profile: Profile, outcomes: Outcomes | None = None) -> None:
        """Use `outcomes` as the cache, by kind of block. Oracles for different heads can share a cache, because blocks
        do not depend on the head."""
        self.profile = profile
        self._by_plan: Outcomes = [{} for _ in profile.kinds] if outcomes is None else outcomes
        self._by_priced_plan: dict[PricedPlan, BlockOutcome] = {}

    def outcome(self, kind: int, priced_plan: PricedPlan) -> BlockOutcome:
        """Return the stored bytes and working set of a block of `kind` under `priced_plan`."""
        outcome = self._by_priced_plan.get(priced_plan)
        if outcome is None:
            outcome = self._by_plan[kind].get(priced_plan.plan)
            if outcome is None:
                outcome = run_block(self.profile.kinds[kind], priced_plan.plan)
                self._by_plan[kind][priced_plan.plan] = outcome
            self._by_priced_plan[priced_plan] = outcome
        return outcome

    def peak_bytes(self, plans: Sequence[PricedPlan]) -> int:
        """Return the peak of a step in which the i-th block runs under `plans[i]`."""
        blocks = zip(self.profile.blocks, plans, strict=True)
        return step_peak_bytes(self.profile, [self.outcome(block.kind, plan) for block, plan in blocks])

    def peak_block(self, plans: Sequence[PricedPlan]) -> int | None:
        """Return the first block whose forward or backward contains the peak, or None if no block does."""
        peak = self.peak_bytes(plans)
        earlier = EarlierBlocks()
        for index, (block, plan) in enumerate(zip(self.profile.blocks, plans, strict=True)):
            outcome = self.outcome(block.kind, plan)
            if earlier.block_peak(self.profile, index, outcome) == peak:
                return index
            earlier = earlier.with_block(outcome)
        return None

    def sort_for_peak(self, plans: Sequence[PricedPlan]) -> list[PricedPlan]:
        """Return the same plans, sorted within each kind of block for the lowest peak.

        While a block's backward runs, the bytes stored by earlier blocks are live. Therefore plans with a large working
        set relative to their stored bytes come first: recomputing blocks first, retaining blocks last. Tensors shared
        by several blocks are neglected.
        """
        pools: dict[int, list[PricedPlan]] = {}
        for block, plan in zip(self.profile.blocks, plans, strict=True):
            pools.setdefault(block.kind, []).append(plan)
        order = {kind: iter(sorted(pool, key=lambda plan: self._sort_key(kind, plan))) for kind, pool in pools.items()}
        return [next(order[block.kind]) for block in self.profile.blocks]

    def _sort_key(self, kind: int, plan: PricedPlan) -> tuple[int, int]:
        outcome = self.outcome(kind, plan)
        return (outcome.stored_bytes - outcome.working_bytes, outcome.stored_bytes)

    def least_peak(self, frontiers: Sequence[Sequence[PricedPlan]]) -> list[PricedPlan]:
        """Return the policy with the least peak among the policies that consist of plans of `frontiers`.

        The peak is found by bisection, exact to the byte.
        """
        pools = [self._by_reads(kind, frontier) for kind, frontier in enumerate(frontiers)]
        policy = [frontiers[block.kind][0] for block in self.profile.blocks]
        low, high = 0, self.peak_bytes(policy)
        while low < high:
            middle = (low + high) // 2
            candidate = self._within(pools, middle)
            if candidate is None:
                low = middle + 1
            else:
                policy, high = candidate, self.peak_bytes(candidate)
        return policy

    def is_peak_below(self, frontiers: Sequence[Sequence[PricedPlan]], nbytes: int) -> bool:
        """Return True if any policy that consists of plans of `frontiers` has a peak below `nbytes`.

        This check is faster than `least_peak`.
        """
        pools = [self._by_reads(kind, frontier) for kind, frontier in enumerate(frontiers)]
        return self._within(pools, nbytes - 1) is not None

    def _by_reads(self, kind: int, frontier: Sequence[PricedPlan]) -> Pools:
        """Group the plans of `frontier` by the shared tensors that their replay reads. Each group is sorted by stored
        bytes."""
        unsaved = frozenset(index for index, shared in enumerate(self.profile.shared) if not shared.saved)
        pools: Pools = {}
        for plan in frontier:
            outcome = self.outcome(kind, plan)
            pools.setdefault(outcome.shared & unsaved, []).append((plan, outcome))
        return {reads: sorted(pool, key=lambda pair: pair[1].stored_bytes) for reads, pool in pools.items()}

    def _within(self, pools: Sequence[Pools], budget: int) -> list[PricedPlan] | None:
        """Return a policy whose peak is at most `budget`, or None if no policy fits. `pools[k]` contains the plans for
        blocks of the kind with index k. Choose a plan for one block after the other, in forward order: of the plans
        whose own forward and backward fit, the plan that stores least. Storing less never hurts a later block, but
        reading another shared tensor may. Therefore the best policy is tracked for each set of shared tensors."""
        prefixes: dict[frozenset[int], tuple[tuple[PricedPlan, ...], EarlierBlocks]] = {
            frozenset(): ((), EarlierBlocks())
        }
        for index, block in enumerate(self.profile.blocks):
            next_prefixes: dict[frozenset[int], tuple[tuple[PricedPlan, ...], EarlierBlocks]] = {}
            for read, (plans, earlier) in prefixes.items():
                for reads, pool in pools[block.kind].items():
                    fitting = (pair for pair in pool if earlier.block_peak(self.profile, index, pair[1]) <= budget)
                    first = next(fitting, None)
                    if first is None:
                        continue
                    plan, outcome = first
                    extended, other = earlier.with_block(outcome), next_prefixes.get(read | reads)
                    if other is None or extended.stored_bytes < other[1].stored_bytes:
                        next_prefixes[read | reads] = (*plans, plan), extended
            prefixes = next_prefixes
        policies = (list(plans) for plans, _ in prefixes.values())
        return next((policy for policy in policies if self.peak_bytes(policy) <= budget), None)


# The least peak of a step: policies with a lower peak than frontier plans reach, and a lower bound for all policies.
#
# Frontier plans store few bytes for their time, but a peak also contains the working set of a block's backward, which
# grows with each replayed operator. So a local search starts at the policy of frontier plans with the least peak. It
# changes the action of single activations, in the Pareto-optimal plans of the kind of block where the peak occurs, as
# long as this lowers the peak. The result is not proven to have the least peak. The search runs with prices in bytes
# (kinds.py), so that its result does not depend on measured times.

PLANS_PER_ROUND = 8
"""Number of plans per round of the local search whose neighbours (plans that differ in one activation) are computed.
With one plan per round, GPT-2's least peak is 4 % higher."""
MAX_NEIGHBOR_PLANS = 1200
"""Number of neighbour plans after which no further round begins. Each plan takes 0.3 to 1 ms. GPT-2 needs about as many
plans. T5 would continue for a minute, to lower the peak by 2 %."""


def local_search(
    oracle: PeakOracle, models: Sequence[KindModel], frontiers: Sequence[Sequence[PricedPlan]], start: list[PricedPlan]
) -> list[list[PricedPlan]]:
    """Return policies with falling peaks, found by a local search that begins with the policy `start`.

    Of all policies that consist of plans in `frontiers`, `start` has the least peak. The result does not depend on a
    budget.
    """
    pools = [_pareto_plans(oracle, kind, frontier) for kind, frontier in enumerate(frontiers)]
    trail, expanded, remaining = [start], set[PricedPlan](), MAX_NEIGHBOR_PLANS
    while remaining > 0:
        block = oracle.peak_block(trail[-1])
        if block is None:
            break
        kind = oracle.profile.blocks[block].kind
        chosen = _plans_to_expand(oracle, kind, trail[-1], pools[kind], expanded)
        expanded.update(chosen)
        neighbors = [neighbor for plan in chosen for neighbor in _cached_neighbor_plans(models[kind], plan)]
        remaining -= len(neighbors)
        pools[kind] = _pareto_plans(oracle, kind, [*pools[kind], *neighbors])
        if not oracle.is_peak_below(pools, oracle.peak_bytes(trail[-1])):
            break
        trail.append(oracle.least_peak(pools))
    return trail


def _plans_to_expand(
    oracle: PeakOracle, kind: int, policy: Sequence[PricedPlan], pool: Sequence[PricedPlan], expanded: set[PricedPlan]
) -> list[PricedPlan]:
    """Return the plans, for one kind of block, whose neighbours the local search computes next. The plans of `policy`
    come first, then the plans with the least working set."""
    used = set(policy)
    order = sorted(pool, key=lambda plan: (plan not in used, oracle.outcome(kind, plan).working_bytes))
    return [plan for plan in order if plan not in expanded][:PLANS_PER_ROUND]


def _cached_neighbor_plans(model: KindModel, priced_plan: PricedPlan) -> tuple[PricedPlan, ...]:
    neighbors = model.neighbor_plans.get(priced_plan)
    if neighbors is None:
        neighbors = model.neighbor_plans[priced_plan] = tuple(_neighbor_plans(model, priced_plan))
    return neighbors


def _neighbor_plans(model: KindModel, priced_plan: PricedPlan) -> Iterator[PricedPlan]:
    """Yield the plans that differ from `priced_plan` in one activation. Yield nothing if torch's checkpoint runs the
    block."""
    if priced_plan.plan.is_checkpointed:
        return
    choices = dict(priced_plan.plan.choices)
    for value, menu in model.menus.items():
        is_recomputable = model.kind.values[value].saved and model.recompute(value) is not None
        for choice in [*(store.choice for store in menu), *([RECOMPUTE] if is_recomputable else [])]:
            if choice != choices[value]:
                neighbor = price(model, {**choices, value: choice})
                if model.fits_host(neighbor.host_bytes):
                    yield neighbor


def _pareto_plans(oracle: PeakOracle, kind: int, plans: Sequence[PricedPlan]) -> list[PricedPlan]:
    """Return the Pareto-optimal plans. A plan is left out if another plan needs at most as much of every type of
    memory. The types are the stored bytes, the live bytes, the shared tensors, and the working sets of forward and
    backward."""
    optimal: dict[_Needs, PricedPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.ms):
        outcome = oracle.outcome(kind, plan)
        sizes = (outcome.stored_bytes, outcome.live_bytes, outcome.working_bytes, outcome.forward_working_bytes)
        needs = (sizes, outcome.shared)
        if not any(_needs_no_more(other, needs) for other in optimal):
            optimal = {other: plan for other, plan in optimal.items() if not _needs_no_more(needs, other)}
            optimal[needs] = plan
    return list(optimal.values())


def _needs_no_more(needs: _Needs, others: _Needs) -> bool:
    """Return True if each memory need of one plan (`needs`) is at most the same need of another plan (`others`)."""
    (sizes, shared), (other_sizes, other_shared) = needs, others
    return shared <= other_shared and all(size <= other for size, other in zip(sizes, other_sizes, strict=True))


def least_bound(profile: Profile, frontiers: Sequence[Sequence[PricedPlan]]) -> int:
    """Return a lower bound on the peak of all policies.

    The bound is the peak of a step in which each block stores the fewest bytes that it can, and backward takes only the
    memory that every plan needs.
    """
    least = [least_outcome(kind, frontier[-1].nbytes) for kind, frontier in zip(profile.kinds, frontiers, strict=True)]
    return step_peak_bytes(profile, [least[block.kind] for block in profile.blocks])


def least_outcome(kind: KindProfile, stored_bytes: int) -> BlockOutcome:
    """Return a lower bound on the memory of a block of `kind` under any plan that stores at least `stored_bytes`."""
    return BlockOutcome(
        stored_bytes=stored_bytes,
        shared=frozenset(),
        overhead_ms=0.0,
        forward_moments=tuple(event.extra_bytes for event in kind.forward),
        moments=tuple(_unpacked_bytes(kind)),
        live_bytes=max(0, stored_bytes - sum(value.nbytes for value in kind.activations if value.cached)),
    )


def _unpacked_bytes(kind: KindProfile) -> Iterator[int]:
    """Yield, for each event of a block's backward, the bytes that are live under any plan for the block. The bytes are
    those of the saved tensors that autograd has unpacked and not yet freed, and of the temporaries of backward's
    operators. Tensors shared with other blocks are not counted."""
    slots: dict[int, int] = {}
    for event in kind.backward:
        value = kind.slots[event.slot]
        if event.release:
            slots.pop(event.slot, None)
        elif value >= 0 and kind.values[value].shared is None:
            slots[event.slot] = value
        # Equal values may share one storage.
        distinct = {kind.equal.get(value, value) for value in slots.values()}
        live = sum(kind.values[value].nbytes for value in distinct)
        yield live + (event.extra_bytes if event.release else max(event.entry_bytes, event.extra_bytes))
