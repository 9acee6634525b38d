"""What a policy costs and keeps, by replaying it step by step as the executor would, in whole bytes.

It checks the solver and shares no code with it: the solver optimises totals, the simulator walks through one training
step moment by moment. One block's part is `block_outcome.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from adacc_hf.artifacts.block_outcome import BlockOutcome, run_block

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Plan, Policy
    from adacc_hf.artifacts.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training step under a policy keeps, needs and costs."""

    stored_bytes: int
    """Bytes that forward leaves behind for backward, the outside of the blocks and shared tensors included."""
    peak_bytes: int
    """Most bytes live at any moment of the step."""
    overhead_ms: float
    """Time spent on replay, encoding and decoding, over all blocks (the paper's equation 4), and by the head beyond the
    plain one: below 0 where a faster head saves more than the blocks cost."""
    timeline: tuple[tuple[str, int], ...]
    """Moments of the step in order: what runs, and the bytes live then."""

    @cached_property
    def peak_label(self) -> str:
        """What runs when the peak is reached first."""
        return max(self.timeline, key=lambda point: point[1])[0]


def simulate(profile: Profile, plans: Sequence[Plan]) -> Outcome:
    """The outcome of a training step in which the i-th block of `profile` runs under `plans[i]`.

    Raises ValueError for a plan that cannot be carried out.
    """
    outcomes: dict[tuple[int, Plan], BlockOutcome] = {}
    for block, plan in zip(profile.blocks, plans, strict=True):
        if (block.kind, plan) not in outcomes:
            outcomes[block.kind, plan] = run_block(profile.kind_of(block), plan)
    return simulate_blocks(profile, [outcomes[b.kind, plan] for b, plan in zip(profile.blocks, plans, strict=True)])


def simulate_policy(profile: Profile, policy: Policy) -> Outcome:
    """The outcome of a training step of `profile` under `policy`, with the head that it chose. Raises as `simulate`."""
    return simulate(profile.with_head(policy.head), [policy.plan_of(block.name) for block in profile.blocks])


def simulate_blocks(profile: Profile, blocks: Sequence[BlockOutcome]) -> Outcome:
    """The outcome of a training step in which the i-th block of `profile` has the outcome `blocks[i]`."""
    timeline = _timeline(profile, blocks)
    read = frozenset().union(*(block.shared for block in blocks))
    shared_bytes = sum(shared.nbytes for i, shared in enumerate(profile.shared) if shared.saved or i in read)
    return Outcome(
        stored_bytes=sum(block.stored_bytes for block in blocks) + shared_bytes + profile.outside_stored_bytes,
        peak_bytes=max(live for _, live in timeline),
        overhead_ms=sum(block.overhead_ms for block in blocks) + profile.head_overhead_ms,
        timeline=tuple(timeline),
    )


class EarlierBlocks(NamedTuple):
    """What the blocks of a step up to one leave behind."""

    stored_bytes: int = 0
    live_bytes: int = 0
    """What of it forward does not hold anyway."""
    shared: frozenset[int] = frozenset()
    """Shared tensors that their replay reads."""

    def then(self, outcome: BlockOutcome) -> EarlierBlocks:
        """The same after one more block."""
        return EarlierBlocks(
            self.stored_bytes + outcome.stored_bytes,
            self.live_bytes + outcome.live_bytes,
            self.shared | outcome.shared,
        )

    def bases(self, profile: Profile, index: int, outcome: BlockOutcome) -> tuple[int, int]:
        """Bytes live besides the block's own in the forward and in the backward of the `index`-th, the next one."""
        block = profile.blocks[index]
        read = self.shared | outcome.shared
        shared = profile.further_bytes(index, read) - profile.unread_bytes(index, read)
        return block.forward_base_bytes + self.live_bytes, block.backward_base_bytes + shared + self.stored_bytes

    def block_peak(self, profile: Profile, index: int, outcome: BlockOutcome) -> int:
        """Peak in the forward and the backward of the `index`-th block."""
        forward, backward = self.bases(profile, index, outcome)
        peak = forward + outcome.forward_working_bytes
        return max(peak, backward + outcome.working_bytes) if outcome.moments else peak

    def head_peaks(self, profile: Profile) -> tuple[int, int]:
        """Peaks in the forward and the backward of the head and the loss, after all blocks."""
        outside, loss = profile.head_peaks(self.shared)
        return outside + self.live_bytes, loss + self.stored_bytes


def step_peak_bytes(profile: Profile, outcomes: Sequence[BlockOutcome]) -> int:
    """Peak of a step in which the i-th block has `outcomes[i]`: `simulate(...).peak_bytes` without the timeline."""
    peaks = [profile.tail_peak_bytes, profile.optimizer_peak_bytes]
    earlier = EarlierBlocks()
    for index, outcome in enumerate(outcomes):
        peaks.append(earlier.block_peak(profile, index, outcome))
        earlier = earlier.then(outcome)
    return max(*peaks, *earlier.head_peaks(profile))


def _timeline(profile: Profile, outcomes: Sequence[BlockOutcome]) -> list[tuple[str, int]]:
    """Forward, head and loss, backward from the last block to the first, what follows it, and the optimizer."""
    earlier = EarlierBlocks()
    points: list[tuple[str, int]] = []
    backward: list[list[tuple[str, int]]] = []
    for index, (block, outcome) in enumerate(zip(profile.blocks, outcomes, strict=True)):
        forward_base, backward_base = earlier.bases(profile, index, outcome)
        points += [(f"forward {block.name}", forward_base + live) for live in outcome.forward_moments]
        backward.append([(f"backward {block.name}", backward_base + live) for live in outcome.moments])
        earlier = earlier.then(outcome)
    points += zip(("head and loss", "backward of head and loss"), earlier.head_peaks(profile), strict=True)
    for moments in reversed(backward):
        points += moments
    points.append(("before or after the blocks", profile.tail_peak_bytes))
    if profile.optimizer_peak_bytes:
        points.append(("optimizer", profile.optimizer_peak_bytes))
    return points
