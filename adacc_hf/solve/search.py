"""Search for the fastest policy within a memory budget, for one output head.

A dynamic program gives the blocks plans of their kinds' pools, one block after the other in forward order. A label is
the best way found to run the blocks so far: its stored bytes and its time. A label is extended by each plan of the next
block whose own forward and backward fit the budget. Labels that store about as many bytes compete, and the fastest one
stays. Labels whose time cannot end below that of a known policy are left out (`TimeBound`).

The policy leaves a part of the budget unused, because pools contain few plans. So the search refines it: it asks the
integer program for the fastest plans that use the rest, adds them to the pools, and assigns plans again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.memory_simulator import EarlierBlocks, simulate_blocks
from adacc_hf.solve.bounds import least_outcome
from adacc_hf.solve.plan_pools import NS_PER_MS, Candidate, Columns, PlanPools
from adacc_hf.solve.simple_policies import policy_of_plans

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_outcome import BlockOutcome
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.solve.plan_pools import Ints

NUM_LABELS = 2048
"""Number of sizes of stored bytes that labels are distinguished by. With 256, policies of 48 blocks took up to 26 %
more time."""
NUM_FIRST_LABELS = 128
"""The same number for the first policy, whose time limits the labels of the second."""
NUM_HOST_SIZES = 16
"""Number of sizes of bytes in host memory that labels are distinguished by."""
MAX_REFINEMENTS = 2
ENOUGH = 3e-3
"""Largest distance of a policy's time from the lower bound, as a fraction of the time, at which it is not refined."""
FAR = 0.02
"""The same distance above which the pools are extended."""


@dataclass(frozen=True)
class Limits:
    """Limits of a policy's memory."""

    budget: Budget
    host_bytes: int

    def with_budget(self, nbytes: int) -> Limits:
        return Limits(Budget(nbytes, nbytes, self.budget.limits_peak), self.host_bytes)


class _Labels(NamedTuple):
    """Sums over the blocks so far of each label."""

    stored: Ints
    live: Ints
    host: Ints
    ns: Ints
    reads: Ints
    parents: Ints
    """Index of the label of the blocks before."""
    chosen: Ints
    """Number of the last block's plan in its pool."""

    def take(self, index: Ints) -> _Labels:
        return _Labels(*(column[index] for column in self))


class PolicySearch:
    """Search for the fastest policy of a profile with the profile's head (output layer and loss)."""

    def __init__(self, profile: Profile, pools: PlanPools) -> None:
        self.profile = profile
        self.pools = pools
        self.head_ms = profile.head_overhead_ms
        """Extra time in ms of the profile's head compared to the plain head."""
        self._num_blocks = Counter(block.kind for block in profile.blocks)

    def within(self, limits: Limits, most_ms: float = math.inf) -> list[Candidate] | None:
        """Return the fastest policy found within `limits`, one plan per block, or None if no policy is found that takes
        at most `most_ms`."""
        policy = self._refined(limits, most_ms)
        ms = most_ms if policy is None else self.ms(policy)
        if not self.pools.is_extended and (ms == math.inf or ms - self.bound_ms(limits.budget) > FAR * abs(ms)):
            self.pools.extend()
            policy = self._refined(limits, ms) or policy
        return policy if policy is None or limits.budget.limits_peak else self._sorted_for_peak(policy)

    def _refined(self, limits: Limits, most_ms: float) -> list[Candidate] | None:
        bound_ms = self.bound_ms(limits.budget)
        if bound_ms >= most_ms:
            return None
        # Labels compete in stored bytes alone, so that all may fail where the policy with the least memory fits.
        first = self._assigned(limits, NUM_FIRST_LABELS, most_ms) or self._assigned(limits, 1, by_time=False)
        if first is None or self.ms(first) > most_ms:
            return None
        policy = self._assigned(limits, NUM_LABELS, self.ms(first)) or first
        for _ in range(MAX_REFINEMENTS):
            ms = self.ms(policy)
            if ms - bound_ms <= ENOUGH * abs(ms):
                break
            self._refine(policy, limits)
            policy = self._assigned(limits, NUM_LABELS, ms) or policy
            if self.ms(policy) >= ms:
                break
        return policy

    def ms(self, policy: Sequence[Candidate]) -> float:
        """Return the overhead of a policy, with the head's."""
        return math.fsum(each.outcome.overhead_ms for each in policy) + self.head_ms

    def fitting(self, limits: Limits) -> list[Candidate] | None:
        """Return a policy within `limits`, or None if no policy fits, whatever the measured times."""
        policy = self._assigned(limits, 1, by_time=False)
        if policy is None and not self.pools.is_extended:
            self.pools.extend()
            policy = self._assigned(limits, 1, by_time=False)
        return policy

    def policy_of(self, candidates: Sequence[Candidate]) -> Policy:
        """Return the policy with one of `candidates` for each block."""
        return policy_of_plans(self.profile, [candidate.plan for candidate in candidates])

    def least(self, budget: Budget, host_bytes: int, most_bytes: int = 1 << 62) -> Policy | None:
        """Return the policy with the least peak, or with the fewest stored bytes, whatever the measured times. Return
        None if no policy needs at most `most_bytes`.

        The policy is found by bisection, exact to the byte.
        """
        limits = Limits(budget, host_bytes)
        policy = self.fitting(limits.with_budget(most_bytes))
        if policy is None:
            return None
        low, high = 0, self._needed_bytes([each.outcome for each in policy], budget)
        while low < high:
            middle = (low + high) // 2
            candidate = self.fitting(limits.with_budget(middle))
            if candidate is None:
                low = middle + 1
            else:
                policy, high = candidate, self._needed_bytes([each.outcome for each in candidate], budget)
        return self.policy_of(policy)

    def _needed_bytes(self, blocks: Sequence[BlockOutcome], budget: Budget) -> int:
        outcome = simulate_blocks(self.profile, blocks)
        return outcome.peak_bytes if budget.limits_peak else outcome.stored_bytes

    def bound_ms(self, budget: Budget) -> float:
        """Return a lower bound on the overhead in ms of any policy within the budget, or infinity if none can fit."""
        bound_ms = float(self.pools.bound.least_ms(self._num_blocks, self._room(budget)))
        if budget.limits_peak:
            # While the backward of a block runs, the remaining memory limits the bytes that the earlier blocks store.
            earlier: Counter[int] = Counter()
            least = self._least_outcomes(stored=False)
            for index, block in enumerate(self.profile.blocks):
                outcome = least[block.kind]
                _, base = EarlierBlocks().base_bytes(self.profile, index, outcome)
                room = budget.nbytes - base - outcome.working_bytes
                bound_ms = max(bound_ms, float(self.pools.bound.least_ms(earlier, room)))
                earlier[block.kind] += 1
        return bound_ms + self.head_ms

    def bound_bytes(self, budget: Budget) -> int:
        """Return a lower bound on the bytes that all policies need."""
        least = self._least_outcomes(stored=True)
        return self._needed_bytes([least[block.kind] for block in self.profile.blocks], budget)

    def _least_outcomes(self, *, stored: bool) -> dict[int, BlockOutcome]:
        pools = self.pools.by_kind
        least = {kind: int(pool.columns().stored.min()) if stored else 0 for kind, pool in pools.items()}
        return {kind: least_outcome(pool.variants, least[kind]) for kind, pool in pools.items()}

    @cached_property
    def _fixed_bytes(self) -> int:
        """Bytes that every policy stores: outside the blocks, and in shared tensors that autograd saves."""
        return self.profile.outside_stored_bytes + sum(s.nbytes for s in self.profile.shared if s.saved)

    def _room(self, budget: Budget) -> int:
        """Return the maximum number of bytes that all blocks together can store if a policy fits the budget."""
        if not budget.limits_peak:
            return budget.nbytes - self._fixed_bytes
        # While the head runs, all bytes that blocks store are live. In its forward, autocast's cached casts of
        # parameters are live too, whether or not they are stored.
        kinds = [self.profile.kind_of(block) for block in self.profile.blocks]
        cast_bytes = sum(value.nbytes for kind in kinds for value in kind.activations if value.cached)
        return budget.nbytes - max(EarlierBlocks(live_bytes=-cast_bytes).head_peaks(self.profile))

    def _refine(self, policy: Sequence[Candidate], limits: Limits) -> None:
        """Add plans to the pools that use the bytes that `policy` leaves free: for one block of each kind, and for all
        its blocks alike."""
        free_bytes = limits.budget.nbytes - self._needed_bytes([each.outcome for each in policy], limits.budget)
        used: dict[tuple[int, int], list[int]] = {}
        for block, candidate in zip(self.profile.blocks, policy, strict=True):
            used.setdefault((block.kind, candidate.variant), []).append(candidate.outcome.stored_bytes)
        read = frozenset().union(*(candidate.outcome.shared for candidate in policy))
        for (kind, variant), sizes in used.items():
            pool = self.pools.by_kind[kind]
            for nbytes in {*(size + free_bytes for size in sizes), (sum(sizes) + free_bytes) // len(sizes)}:
                new = pool.refine(variant, nbytes)
                if new and (shared_bytes := self.profile.unsaved_bytes(new.outcome.shared - read)):
                    pool.refine(variant, max(nbytes - shared_bytes, min(sizes)))

    def _sorted_for_peak(self, policy: Sequence[Candidate]) -> list[Candidate]:
        """Return the same plans, sorted within each kind of block for the lowest peak.

        While a block's backward runs, the bytes stored by earlier blocks are live. Therefore plans with a large working
        set relative to their stored bytes come first: recomputing blocks first, retaining blocks last.
        """
        own: dict[int, list[Candidate]] = {}
        for block, candidate in zip(self.profile.blocks, policy, strict=True):
            own.setdefault(block.kind, []).append(candidate)
        order = {kind: iter(sorted(candidates, key=_sort_key)) for kind, candidates in own.items()}
        return [next(order[block.kind]) for block in self.profile.blocks]

    def _assigned(
        self, limits: Limits, num_labels: int, most_ms: float = math.inf, *, by_time: bool = True
    ) -> list[Candidate] | None:
        """Return the fastest policy within `limits` from plans of the pools, or None if no policy fits that takes at
        most `most_ms`. If not `by_time`, return the policy that stores least, from plans that do not depend on measured
        times."""
        budget, profile = limits.budget, self.profile
        if budget.limits_peak and max(profile.tail_peak_bytes, profile.optimizer_peak_bytes) > budget.nbytes:
            return None
        columns = {kind: pool.columns(by_time=by_time) for kind, pool in self.pools.by_kind.items()}
        least = {kind: int(each.stored.min()) for kind, each in columns.items()}
        room = self._room(budget)
        rest = self._num_blocks.copy()
        labels = _Labels(*np.zeros((7, 1), dtype=np.int64))
        most_host_bytes = sum(int(columns[block.kind].host.max()) for block in profile.blocks)
        host_limit = limits.host_bytes if most_host_bytes > limits.host_bytes else None
        trace = []
        for index, block in enumerate(profile.blocks):
            rest[block.kind] -= 1
            labels = self._extended(labels, columns[block.kind], index, limits)
            room_of_rest = room - labels.stored
            fitting = room_of_rest >= sum(number * least[kind] for kind, number in rest.items())
            if most_ms < math.inf:
                rest_ms = self.pools.bound.least_ms(rest, room_of_rest.astype(np.float64)) + self.head_ms
                fitting &= labels.ns / NS_PER_MS + rest_ms <= most_ms + len(profile.blocks) / NS_PER_MS
            labels = labels.take(np.flatnonzero(fitting))
            if not labels.stored.size:
                return None
            if not by_time:
                labels = labels._replace(ns=np.zeros_like(labels.ns))
            labels = labels.take(self._best(labels, num_labels, host_limit))
            trace.append(labels)
        final = np.flatnonzero([self._fits_head(labels, index, budget) for index in range(labels.stored.size)])
        if not final.size:
            return None
        label = final[np.lexsort((labels.stored[final], labels.ns[final]))[0]]
        policy: list[Candidate] = []
        for block, labels in zip(reversed(profile.blocks), reversed(trace), strict=True):
            policy.append(self.pools.by_kind[block.kind].candidates[labels.chosen[label]])
            label = labels.parents[label]
        return policy[::-1]

    def _extended(self, labels: _Labels, plans: Columns, index: int, limits: Limits) -> _Labels:
        """Return each label with each plan of block `index` that fits in its own forward and backward."""
        block, nbytes = self.profile.blocks[index], limits.budget.nbytes
        reads = labels.reads[:, None] | plans.reads
        host = labels.host[:, None] + plans.host
        fitting = host <= limits.host_bytes
        if limits.budget.limits_peak:
            fitting &= block.forward_base_bytes + labels.live[:, None] + plans.forward <= nbytes
            backward_bytes = block.backward_base_bytes + self._shared_bytes(index, reads)
            fitting &= backward_bytes + labels.stored[:, None] + plans.backward <= nbytes
        parents, chosen = np.nonzero(fitting)
        return _Labels(
            stored=labels.stored[parents] + plans.stored[chosen],
            live=labels.live[parents] + plans.live[chosen],
            host=host[parents, chosen],
            ns=labels.ns[parents] + plans.ns[chosen],
            reads=reads[parents, chosen],
            parents=parents,
            chosen=plans.number[chosen],
        )

    def _shared_bytes(self, index: int, reads: Ints) -> Ints:
        """Return the bytes of shared tensors in the backward of block `index`, more than in the block's base."""
        masks, inverse = np.unique(reads, return_inverse=True)
        extra = [self.profile.extra_shared_bytes(index, _indices(mask)) for mask in masks.tolist()]
        return np.array(extra, dtype=np.int64)[inverse].reshape(reads.shape)

    def _best(self, labels: _Labels, num_labels: int, host_limit: int | None) -> Ints:
        """Return the indices of the labels to extend. Of the labels that read the same shared tensors and store about
        as much, this is the fastest one. Labels that another one surpasses in both are left out."""
        size = labels.stored * num_labels // max(1, self.profile.plain_stored_bytes)
        group = labels.reads
        if host_limit:
            size = size * 4 // NUM_HOST_SIZES
            group = group * (NUM_HOST_SIZES + 1) + labels.host * NUM_HOST_SIZES // host_limit
        order = np.lexsort((labels.stored, labels.ns, size, group))
        group, ns, stored = group[order], labels.ns[order], labels.stored[order]
        starts = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
        best = []
        for start, end in zip(starts, [*starts[1:], group.size], strict=True):
            least_ns = np.minimum.accumulate(ns[start:end])
            stays = np.concatenate(([True], ns[start + 1 : end] < least_ns[:-1]))
            stays[np.argmin(stored[start:end])] = True  # so that a policy is found if any fits
            best.append(start + np.flatnonzero(stays))
        return order[np.concatenate(best)]

    def _fits_head(self, labels: _Labels, index: int, budget: Budget) -> bool:
        read, stored = _indices(int(labels.reads[index])), int(labels.stored[index])
        if budget.limits_peak:
            earlier = EarlierBlocks(stored, int(labels.live[index]), read)
            return max(earlier.head_peaks(self.profile)) <= budget.nbytes
        return self._fixed_bytes + self.profile.unsaved_bytes(read) + stored <= budget.nbytes


def _indices(mask: int) -> frozenset[int]:
    return frozenset(index for index in range(mask.bit_length()) if mask >> index & 1)


def _sort_key(candidate: Candidate) -> tuple[int, int]:
    outcome = candidate.outcome
    return (outcome.stored_bytes - outcome.working_bytes, outcome.stored_bytes)
