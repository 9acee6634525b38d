"""Policies by the peak of the whole step: their order over the blocks, the least peak, and a bound on any."""

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

    Outcomes = dict[tuple[int, Plan], BlockOutcome]
    Pools = dict[frozenset[int], list[tuple[PricedPlan, BlockOutcome]]]
    from adacc_hf.artifacts.profile import KindProfile

    _Needs = tuple[tuple[int, ...], frozenset[int]]


class PeakOracle:
    """Asks the simulator about plans, each once."""

    def __init__(self, profile: Profile, outcomes: Outcomes | None = None) -> None:
        """`outcomes` are those of an oracle for another head, on which no block's own depend."""
        self.profile = profile
        self._by_plan = {} if outcomes is None else outcomes
        self._by_column: dict[PricedPlan, BlockOutcome] = {}

    def outcome(self, kind: int, column: PricedPlan) -> BlockOutcome:
        """What a block of `kind` keeps and needs under `column`."""
        found = self._by_column.get(column)
        if found is None:
            key = (kind, column.plan)
            if key not in self._by_plan:
                self._by_plan[key] = run_block(self.profile.kinds[kind], column.plan)
            found = self._by_column[column] = self._by_plan[key]
        return found

    def peak_bytes(self, columns: Sequence[PricedPlan]) -> int:
        """Peak of a step in which the i-th block runs under `columns[i]`."""
        blocks = zip(self.profile.blocks, columns, strict=True)
        return step_peak_bytes(self.profile, [self.outcome(block.kind, column) for block, column in blocks])

    def peak_block(self, columns: Sequence[PricedPlan]) -> int | None:
        """The block in whose forward or backward the peak is, the first of several; None if it is outside of them."""
        peak = self.peak_bytes(columns)
        earlier = EarlierBlocks()
        for index, (block, column) in enumerate(zip(self.profile.blocks, columns, strict=True)):
            outcome = self.outcome(block.kind, column)
            if earlier.block_peak(self.profile, index, outcome) == peak:
                return index
            earlier = earlier.then(outcome)
        return None

    def arranged(self, columns: Sequence[PricedPlan]) -> list[PricedPlan]:
        """The same columns, for each kind in the order of the lowest peak.

        Of two neighbours the one with more working set over what it stores goes first: a block's backward stands on
        what earlier blocks store. So blocks that recompute come first and blocks that retain last. What replays hold of
        shared tensors is left out of account.
        """
        pools: dict[int, list[PricedPlan]] = {}
        for block, column in zip(self.profile.blocks, columns, strict=True):
            pools.setdefault(block.kind, []).append(column)
        order = {kind: iter(sorted(pool, key=lambda c: self._excess(kind, c))) for kind, pool in pools.items()}
        return [next(order[block.kind]) for block in self.profile.blocks]

    def _excess(self, kind: int, column: PricedPlan) -> tuple[int, int]:
        outcome = self.outcome(kind, column)
        return (outcome.stored_bytes - outcome.working_bytes, outcome.stored_bytes)

    def least_peak(self, frontiers: Sequence[Sequence[PricedPlan]]) -> list[PricedPlan]:
        """The policy made of frontier plans with the least peak there is; exact, to the byte."""
        pools = [self._by_reads(kind, frontier) for kind, frontier in enumerate(frontiers)]
        policy = [frontiers[block.kind][0] for block in self.profile.blocks]
        low, high = 0, self.peak_bytes(policy)
        while low < high:
            middle = (low + high) // 2
            found = self._within(pools, middle)
            if found is None:
                low = middle + 1
            else:
                policy, high = found, self.peak_bytes(found)
        return policy

    def is_peak_below(self, frontiers: Sequence[Sequence[PricedPlan]], nbytes: int) -> bool:
        """Whether any policy made of frontier plans has a lower peak than `nbytes`; quicker than `least_peak`."""
        pools = [self._by_reads(kind, frontier) for kind, frontier in enumerate(frontiers)]
        return self._within(pools, nbytes - 1) is not None

    def _by_reads(self, kind: int, frontier: Sequence[PricedPlan]) -> Pools:
        """The plans by the shared tensors that they hold, each pool with what stores least first."""
        unsaved = frozenset(index for index, shared in enumerate(self.profile.shared) if not shared.saved)
        pools: Pools = {}
        for column in frontier:
            outcome = self.outcome(kind, column)
            pools.setdefault(outcome.shared & unsaved, []).append((column, outcome))
        return {reads: sorted(pool, key=lambda pair: pair[1].stored_bytes) for reads, pool in pools.items()}

    def _within(self, pools: Sequence[Pools], budget: int) -> list[PricedPlan] | None:
        """A policy whose peak keeps to `budget`; None if there is none.

        Block by block from the first, the plan that stores least of those whose own forward and backward fit: storing
        less never hurts a later block. Reading another held tensor may, so each set of them is followed on its own.
        """
        reached: dict[frozenset[int], tuple[tuple[PricedPlan, ...], EarlierBlocks]] = {
            frozenset(): ((), EarlierBlocks())
        }
        for index, block in enumerate(self.profile.blocks):
            following: dict[frozenset[int], tuple[tuple[PricedPlan, ...], EarlierBlocks]] = {}
            for read, (columns, earlier) in reached.items():
                for reads, pool in pools[block.kind].items():
                    fitting = (pair for pair in pool if earlier.block_peak(self.profile, index, pair[1]) <= budget)
                    first = next(fitting, None)
                    if first is None:
                        continue
                    column, outcome = first
                    then, other = earlier.then(outcome), following.get(read | reads)
                    if other is None or then.stored_bytes < other[1].stored_bytes:
                        following[read | reads] = (*columns, column), then
            reached = following
        policies = (list(columns) for columns, _ in reached.values())
        return next((policy for policy in policies if self.peak_bytes(policy) <= budget), None)


# How small the peak of a step can get: policies below what the frontiers reach, and a bound that no policy is below.
#
# The plans of a frontier store little for their time, which is not all that a peak asks for: replaying more adds to the
# working set of a block's backward. So from the policy of frontier plans with the least peak on, single activations get
# another action, in all plans of the kind of block where the peak is that are the best for some need of memory, as long
# as that lowers the peak. It is a local search: what it ends at is the best found, not proven to be the least.

VARIED = 8
"""Plans that are varied in a round: one leaves GPT-2's floor 4 % higher."""
VARIATIONS = 1200
"""Changes after which no round begins, each 0.3 to 1 ms: what GPT-2 takes. T5's would go on for a minute, for 2 %."""


def local_search(
    oracle: PeakOracle, models: Sequence[KindModel], frontiers: Sequence[Sequence[PricedPlan]], start: list[PricedPlan]
) -> list[list[PricedPlan]]:
    """Policies of falling peak, from `start` on, which has the least that frontier plans reach; they depend on no
    budget."""
    pools = [_undominated(oracle, kind, frontier) for kind, frontier in enumerate(frontiers)]
    trail, varied, num_left = [start], set[PricedPlan](), VARIATIONS
    while num_left > 0:
        block = oracle.peak_block(trail[-1])
        if block is None:
            break
        kind = oracle.profile.blocks[block].kind
        new = _to_vary(oracle, kind, trail[-1], pools[kind], varied)
        varied.update(new)
        changed = [change for column in new for change in _changed(models[kind], column)]
        num_left -= len(changed)
        pools[kind] = _undominated(oracle, kind, [*pools[kind], *changed])
        if not oracle.is_peak_below(pools, oracle.peak_bytes(trail[-1])):
            break
        trail.append(oracle.least_peak(pools))
    return trail


def _to_vary(
    oracle: PeakOracle, kind: int, policy: Sequence[PricedPlan], pool: Sequence[PricedPlan], varied: set[PricedPlan]
) -> list[PricedPlan]:
    """Plans of a kind that were not varied yet: what the policy has, then those with the smallest working sets."""
    used = set(policy)
    order = sorted(pool, key=lambda column: (column not in used, oracle.outcome(kind, column).working_bytes))
    return [column for column in order if column not in varied][:VARIED]


def _changed(model: KindModel, column: PricedPlan) -> Iterator[PricedPlan]:
    """The plans that differ from `column` in one activation; none if torch's checkpoint runs the whole block."""
    if column.plan.is_checkpointed:
        return
    choices = dict(column.plan.choices)
    for value, menu in model.menus.items():
        can_go = model.kind.values[value].saved and model.recompute(value) is not None
        for choice in [*(store.choice for store in menu), *([RECOMPUTE] if can_go else [])]:
            if choice != choices[value]:
                yield price(model, {**choices, value: choice})


def _undominated(oracle: PeakOracle, kind: int, columns: Sequence[PricedPlan]) -> list[PricedPlan]:
    """Those that no other needs less memory than at every moment that counts."""
    kept: dict[_Needs, PricedPlan] = {}
    for column in sorted(columns, key=lambda column: column.ms):
        outcome = oracle.outcome(kind, column)
        sizes = (outcome.stored_bytes, outcome.live_bytes, outcome.working_bytes, outcome.forward_working_bytes)
        needs = (sizes, outcome.shared)
        if not any(_is_within(other, needs) for other in kept):
            kept = {other: kept[other] for other in kept if not _is_within(needs, other)} | {needs: column}
    return list(kept.values())


def _is_within(needs: _Needs, others: _Needs) -> bool:
    (sizes, shared), (other_sizes, other_shared) = needs, others
    return shared <= other_shared and all(size <= other for size, other in zip(sizes, other_sizes, strict=True))


def least_bound(profile: Profile, frontiers: Sequence[Sequence[PricedPlan]]) -> int:
    """Bytes that no policy's peak is below: what is live in any case, with the least that blocks can store."""
    least = [least_outcome(kind, frontier[-1].nbytes) for kind, frontier in zip(profile.kinds, frontiers, strict=True)]
    return step_peak_bytes(profile, [least[block.kind] for block in profile.blocks])


def least_outcome(kind: KindProfile, stored_bytes: int) -> BlockOutcome:
    """What no plan for a block of `kind` keeps and needs less than, if none stores less than `stored_bytes`."""
    return BlockOutcome(
        stored_bytes=stored_bytes,
        shared=frozenset(),
        overhead_ms=0.0,
        forward_moments=tuple(event.extra_bytes for event in kind.forward),
        moments=tuple(_handed_bytes(kind)),
        live_bytes=max(0, stored_bytes - sum(value.nbytes for value in kind.activations if value.cached)),
    )


def _handed_bytes(kind: KindProfile) -> Iterator[int]:
    """What is live at each moment of a block's backward whatever its plan: what autograd holds at once, and the rest's
    own."""
    slots: dict[int, int] = {}
    for event in kind.backward:
        value = kind.slots[event.slot]
        if event.release:
            slots.pop(event.slot, None)
        elif value >= 0 and kind.values[value].shared is None:
            slots[event.slot] = value
        # A repeated value may be the other's own storage.
        distinct = {kind.equal.get(value, value) for value in slots.values()}
        live = sum(kind.values[value].nbytes for value in distinct)
        yield live + (event.extra_bytes if event.release else max(event.entry_bytes, event.extra_bytes))
