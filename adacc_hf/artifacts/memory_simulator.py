"""Simulation of the memory and time of one training step under a policy, moment by moment, in whole bytes.

The solver searches with the simulated outcomes of blocks. The sums over blocks in its integer program and its search
are its own, so the simulation of the whole step checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from adacc_hf.artifacts.block_outcome import BlockOutcome, run_block
from adacc_hf.artifacts.plans import recompute_plan

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Plan, Policy
    from adacc_hf.artifacts.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Memory and time of one training step under a policy."""

    stored_bytes: int
    """Bytes stored by forward for backward, including shared tensors and the model outside the blocks."""
    peak_bytes: int
    """Peak of the step in bytes."""
    overhead_ms: float
    """Time of replay, encoding and decoding in all blocks (the paper's equation 4), plus the time of the head minus
    that of the plain head, which may be negative."""
    timeline: tuple[tuple[str, int], ...]
    """Sequence of (label of the part of the step, live bytes), one for each simulated moment, in order."""
    host_bytes: int = 0
    """Peak of the bytes in host memory: the sum over all blocks, as no payload is freed before all are stored."""

    @cached_property
    def peak_label(self) -> str:
        """Label of the part of the step that first reaches the peak."""
        return max(self.timeline, key=lambda point: point[1])[0]


def simulate(profile: Profile, plans: Sequence[Plan]) -> Outcome:
    """Simulate a training step in which the i-th block of `profile` runs under `plans[i]`.

    Raises ValueError for a plan that cannot be executed.
    """
    profile = profile.under(plans)
    outcomes: dict[tuple[int, Plan], BlockOutcome] = {}
    for block, plan in zip(profile.blocks, plans, strict=True):
        if (block.kind, plan) not in outcomes:
            outcomes[block.kind, plan] = run_block(profile.kind_of(block), plan)
    return simulate_blocks(profile, [outcomes[b.kind, plan] for b, plan in zip(profile.blocks, plans, strict=True)])


def simulate_policy(profile: Profile, policy: Policy) -> Outcome:
    """Simulate a training step under `policy` and its head. Raises ValueError for a plan that cannot be executed."""
    return simulate(profile.with_head(policy.head), [policy.plan_of(block.name) for block in profile.blocks])


def simulate_blocks(profile: Profile, blocks: Sequence[BlockOutcome]) -> Outcome:
    """Simulate a training step in which the i-th block of `profile` has the memory and time `blocks[i]`."""
    timeline = _step_timeline(profile, blocks)
    read = frozenset().union(*(block.shared for block in blocks))
    shared_bytes = sum(shared.nbytes for i, shared in enumerate(profile.shared) if shared.saved or i in read)
    return Outcome(
        stored_bytes=sum(block.stored_bytes for block in blocks) + shared_bytes + profile.outside_stored_bytes,
        peak_bytes=max(live for _, live in timeline),
        overhead_ms=sum(block.overhead_ms for block in blocks) + profile.head_overhead_ms,
        timeline=tuple(timeline),
        host_bytes=sum(block.host_bytes for block in blocks),
    )


class EarlierBlocks(NamedTuple):
    """Sums over the blocks before a certain block of a simulated step."""

    stored_bytes: int = 0
    live_bytes: int = 0
    """Sum of `BlockOutcome.live_bytes`: the stored bytes that add to the live bytes of the model's forward."""
    shared: frozenset[int] = frozenset()
    """Indices into `Profile.shared` of the tensors that replays of these blocks read."""

    def with_block(self, outcome: BlockOutcome) -> EarlierBlocks:
        """Return the sums with the next block's `outcome` added."""
        return EarlierBlocks(
            self.stored_bytes + outcome.stored_bytes,
            self.live_bytes + outcome.live_bytes,
            self.shared | outcome.shared,
        )

    def base_bytes(self, profile: Profile, index: int, outcome: BlockOutcome) -> tuple[int, int]:
        """Return the bytes of the rest of the step in forward and backward of block `index`."""
        block = profile.blocks[index]
        shared = profile.extra_shared_bytes(index, self.shared | outcome.shared)
        return block.forward_base_bytes + self.live_bytes, block.backward_base_bytes + shared + self.stored_bytes

    def head_peaks(self, profile: Profile) -> tuple[int, int]:
        """Return the peak bytes of (forward, backward) of the head and the loss, which run after all blocks."""
        outside, loss = profile.head_peaks(self.shared)
        return outside + self.live_bytes, loss + self.stored_bytes


def _step_timeline(profile: Profile, outcomes: Sequence[BlockOutcome]) -> list[tuple[str, int]]:
    """Return (label, live bytes) of each moment of a step, from the forward to the optimizer, in order."""
    earlier = EarlierBlocks()
    points: list[tuple[str, int]] = []
    backward: list[list[tuple[str, int]]] = []
    for index, (block, outcome) in enumerate(zip(profile.blocks, outcomes, strict=True)):
        forward_base, backward_base = earlier.base_bytes(profile, index, outcome)
        points += [(f"forward {block.name}", forward_base + live) for live in outcome.forward_moments]
        backward.append([(f"backward {block.name}", backward_base + live) for live in outcome.moments])
        earlier = earlier.with_block(outcome)
    points += zip(("head and loss", "backward of head and loss"), earlier.head_peaks(profile), strict=True)
    for moments in reversed(backward):
        points += moments
    points.append(("before or after the blocks", profile.tail_peak_bytes))
    if profile.optimizer_peak_bytes:
        points.append(("optimizer", profile.optimizer_peak_bytes))
    return points


PASSES_OF_A_STEP = 3
"""Time of the blocks in a plain step, as a multiple of their forward time. `Profile.step_ms` cannot be used, because on
a CPU the recording of memory takes longer than the step."""


def plain_blocks_ms(profile: Profile) -> float:
    """Estimate the milliseconds of the blocks in a plain step from the time that recomputing their forward takes."""
    plans = [recompute_plan(profile.kind_of(block)) for block in profile.blocks]
    return PASSES_OF_A_STEP * simulate(profile, plans).overhead_ms
