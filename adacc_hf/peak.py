"""Policies by the peak of the whole step, as the simulator sees it: their order over the blocks, and the least peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.simulator import BlockOutcome, run_block, step_peak_bytes

if TYPE_CHECKING:
    from adacc_hf.milp import Column
    from adacc_hf.policy import Plan
    from adacc_hf.profile import BlockProfile, Profile

    Outcomes = dict[tuple[int, Plan], BlockOutcome]


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
        stored = held = 0
        for index, (block, column) in enumerate(zip(self.profile.blocks, columns, strict=True)):
            outcome = self.outcome(block.kind, column)
            if self._own_peak(block, outcome, stored, held) == peak:
                return index
            stored += outcome.stored_bytes
            held += outcome.held_bytes
        return None

    def arranged(self, columns: Sequence[Column]) -> list[Column]:
        """The same columns, for each kind in the order of the lowest peak.

        Of two neighbours the one with more working set over what it stores goes first: a block's backward stands on
        what earlier blocks store. So blocks that recompute come first and blocks that retain last.
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
        pools = [
            sorted(((column, self.outcome(kind, column)) for column in frontier), key=lambda pair: pair[1].stored_bytes)
            for kind, frontier in enumerate(frontiers)
        ]
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

    def _within(self, pools: Sequence[Sequence[tuple[Column, BlockOutcome]]], budget: int) -> list[Column] | None:
        """A policy whose peak keeps to `budget`; None if there is none. `pools` have what stores least first.

        Block by block from the first, the plan that stores least of those whose own forward and backward fit: storing
        less never hurts a later block.
        """
        stored = held = 0
        policy = []
        for block in self.profile.blocks:
            fitting = (pair for pair in pools[block.kind] if self._own_peak(block, pair[1], stored, held) <= budget)
            first = next(fitting, None)
            if first is None:
                return None
            column, outcome = first
            policy.append(column)
            stored += outcome.stored_bytes
            held += outcome.held_bytes
        return policy if self.peak_bytes(policy) <= budget else None

    def _own_peak(self, block: BlockProfile, outcome: BlockOutcome, stored: int, held: int) -> int:
        """Peak in the block's forward and backward when earlier blocks store and hold so much."""
        forward = self.profile.forward_base_bytes + held + outcome.forward_working_bytes
        return max(forward, block.backward_base_bytes + stored + outcome.working_bytes if outcome.moments else 0)
