"""What comparing a block's gradient takes: its input is held from its forward, and the gradient of its output from its
backward, until the step's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.policy import Action
from adacc_hf.simulator import BlockOutcome, run_block

if TYPE_CHECKING:
    from adacc_hf.policy import Plan, Policy
    from adacc_hf.profile import KindProfile, Profile


def peaks_with_samples(profile: Profile, policy: Policy) -> dict[str, int]:
    """Most bytes live in a step under `policy` that holds a sample of one block, by the block's name."""
    profile = profile.with_head(policy.head)
    plans = [policy.plan_of(block.name) for block in profile.blocks]
    known: dict[tuple[int, Plan], BlockOutcome] = {}
    for block, plan in zip(profile.blocks, plans, strict=True):
        if (block.kind, plan) not in known:
            known[block.kind, plan] = run_block(profile.kind_of(block), plan)
    peaks = _Peaks(profile, [known[block.kind, plan] for block, plan in zip(profile.blocks, plans, strict=True)])
    return {
        block.name: peaks.with_sample(index, *_input_bytes(profile.kind_of(block), plan))
        for index, (block, plan) in enumerate(zip(profile.blocks, plans, strict=True))
    }


def _input_bytes(kind: KindProfile, plan: Plan) -> tuple[int, int]:
    """Bytes of a block's own inputs, and of those that it does not keep as they are."""
    choices = dict(plan.choices)
    inputs = [value for value in kind.values if value.producer is None and value.activation]
    kept = [value for value in inputs if value.saved and choices[value.index].action is Action.RETAIN]
    held = sum(value.nbytes for value in inputs)
    return held, held - sum(value.nbytes for value in kept)


class _Peaks:
    """The peak of each stretch of a step."""

    def __init__(self, profile: Profile, outcomes: Sequence[BlockOutcome]) -> None:
        stored = held = 0
        read: frozenset[int] = frozenset()
        self.forward: list[int] = []
        self.backward: list[int] = []
        for index, (block, outcome) in enumerate(zip(profile.blocks, outcomes, strict=True)):
            self.forward.append(block.forward_base_bytes + held + outcome.forward_working_bytes)
            read |= outcome.shared
            base = block.backward_base_bytes - profile.unread_bytes(index, read)
            self.backward.append(base + stored + outcome.working_bytes)
            stored += outcome.stored_bytes
            held += outcome.held_bytes
        outside, loss = profile.head_peaks(read)
        self.head = max(outside + held, loss + stored)
        self.tail = max(profile.tail_peak_bytes, profile.optimizer_peak_bytes)

    def with_sample(self, index: int, held: int, unkept: int) -> int:
        """The peak with a sample of the `index`-th block, whose inputs take `held` bytes, `unkept` of them on top of
        what it stores. The gradient of its output is as large as its input, to which it is added."""
        before = max([*self.forward[index:], self.head, *self.backward[index + 1 :]]) + unkept
        own = self.backward[index] + unkept + held
        after = max([self.tail, *self.backward[:index]]) + 2 * held
        return max([before, own, after, *self.forward[:index]])
