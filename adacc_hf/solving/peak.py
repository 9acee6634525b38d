"""Policies by the peak of the whole step, as the simulator sees it: their order over the blocks, and the least peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adacc_hf.simulator import BlockOutcome, run_block, step_peak_bytes

if TYPE_CHECKING:
    from adacc_hf.policy import Plan
    from adacc_hf.profile import Profile
    from adacc_hf.solving.milp import Column

    Outcomes = dict[tuple[int, Plan], BlockOutcome]
    Pools = dict[frozenset[int], list[tuple[Column, BlockOutcome]]]


class PeakOracle:
    """Asks the simulator about plans, each once."""

    def __init__(self, profile: Profile, outcomes: Outcomes | None = None) -> None:
        """`outcomes` are those of an oracle for another head, on which no block's own depend."""
        self.profile = profile
        self._by_plan = {} if outcomes is None else outcomes
        self._by_column: dict[Column, BlockOutcome] = {}

    def outcome(self, kind: int, column: Column) -> BlockOutcome:
        """What a block of `kind` keeps and needs under `column`."""
        found = self._by_column.get(column)
        if found is None:
            key = (kind, column.plan)
            if key not in self._by_plan:
                self._by_plan[key] = run_block(self.profile.kinds[kind], column.plan)
            found = self._by_column[column] = self._by_plan[key]
        return found

    def peak_bytes(self, columns: Sequence[Column]) -> int:
        """Peak of a step in which the i-th block runs under `columns[i]`."""
        blocks = zip(self.profile.blocks, columns, strict=True)
        return step_peak_bytes(self.profile, [self.outcome(block.kind, column) for block, column in blocks])

    def peak_block(self, columns: Sequence[Column]) -> int | None:
        """The block in whose forward or backward the peak is, the first of several; None if it is outside of them."""
        peak = self.peak_bytes(columns)
        before = _Before()
        for index, (block, column) in enumerate(zip(self.profile.blocks, columns, strict=True)):
            outcome = self.outcome(block.kind, column)
            if self._own_peak(index, outcome, before) == peak:
                return index
            before = before.then(column, outcome)
        return None

    def arranged(self, columns: Sequence[Column]) -> list[Column]:
        """The same columns, for each kind in the order of the lowest peak.

        Of two neighbours the one with more working set over what it stores goes first: a block's backward stands on
        what earlier blocks store. So blocks that recompute come first and blocks that retain last. What replays hold of
        shared tensors is left out of account.
        """
        pools: dict[int, list[Column]] = {}
        for block, column in zip(self.profile.blocks, columns, strict=True):
            pools.setdefault(block.kind, []).append(column)
        order = {kind: iter(sorted(pool, key=lambda c: self._excess(kind, c))) for kind, pool in pools.items()}
        return [next(order[block.kind]) for block in self.profile.blocks]

    def _excess(self, kind: int, column: Column) -> tuple[int, int]:
        outcome = self.outcome(kind, column)
        return (outcome.stored_bytes - outcome.working_bytes, outcome.stored_bytes)

    def least_peak(self, frontiers: Sequence[Sequence[Column]]) -> list[Column]:
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

    def is_peak_below(self, frontiers: Sequence[Sequence[Column]], nbytes: int) -> bool:
        """Whether any policy made of frontier plans has a lower peak than `nbytes`; quicker than `least_peak`."""
        pools = [self._by_reads(kind, frontier) for kind, frontier in enumerate(frontiers)]
        return self._within(pools, nbytes - 1) is not None

    def _by_reads(self, kind: int, frontier: Sequence[Column]) -> Pools:
        """The plans by the held tensors that their replay reads, each pool with what stores least first."""
        pools: Pools = {}
        for column in frontier:
            outcome = self.outcome(kind, column)
            pools.setdefault(outcome.shared & self.profile.held[-1], []).append((column, outcome))
        return {reads: sorted(pool, key=lambda pair: pair[1].stored_bytes) for reads, pool in pools.items()}

    def _within(self, pools: Sequence[Pools], budget: int) -> list[Column] | None:
        """A policy whose peak keeps to `budget`; None if there is none.

        Block by block from the first, the plan that stores least of those whose own forward and backward fit: storing
        less never hurts a later block. Reading another held tensor may, so each set of them is followed on its own.
        """
        reached = {frozenset(): _Before()}
        for index, block in enumerate(self.profile.blocks):
            following: dict[frozenset[int], _Before] = {}
            for read, before in reached.items():
                for reads, pool in pools[block.kind].items():
                    fitting = (pair for pair in pool if self._own_peak(index, pair[1], before) <= budget)
                    first = next(fitting, None)
                    other = following.get(read | reads)
                    if first is not None and (other is None or before.stored + first[1].stored_bytes < other.stored):
                        following[read | reads] = before.then(*first)
            reached = following
        policies = (list(before.columns) for before in reached.values())
        return next((policy for policy in policies if self.peak_bytes(policy) <= budget), None)

    def _own_peak(self, index: int, outcome: BlockOutcome, before: _Before) -> int:
        """Peak in the forward and backward of the `index`-th block after `before`."""
        block = self.profile.blocks[index]
        forward = block.forward_base_bytes + before.held + outcome.forward_working_bytes
        if not outcome.moments:
            return forward
        base = block.backward_base_bytes + before.stored
        unread = self.profile.unread_bytes(index, before.read | outcome.shared)
        return max(forward, base - unread + outcome.working_bytes)


@dataclass(frozen=True, slots=True)
class _Before:
    """What the blocks before one were given, and what that leaves behind."""

    columns: tuple[Column, ...] = ()
    stored: int = 0
    held: int = 0
    """Bytes that forward does not hold anyway."""
    read: frozenset[int] = frozenset()
    """Shared tensors that their replay reads."""

    def then(self, column: Column, outcome: BlockOutcome) -> _Before:
        """The same after one more block."""
        stored, held = self.stored + outcome.stored_bytes, self.held + outcome.held_bytes
        return _Before((*self.columns, column), stored, held, self.read | outcome.shared)
