"""FallbackStats: counts fallback steps during a run. Texts on a policy's costs, and on how much of a run followed it.

A fallback step is a step in which at least one call of a block did not follow a policy. The counts are stored in
records of the run's history. The functions at the end of this module read the counts for the Trainer's log and the
reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.artifacts.memory_simulator import plain_blocks_ms
from adacc_hf.artifacts.policy import Action, BlockAction, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.batch_shapes import num_elements

NO_POLICY = "full recomputation, because there is no policy for batches of this size"
UNCOMPILED = "a forward without compiled graphs, which has no budget"
BEFORE = "full recomputation, before there was a policy"
"""Reason of the fallback steps before the run's first policy. The constants above are the reasons of later fallback
steps."""

FALLBACK = "fallback"
"""Value of "event" in the history's records that count fallback steps."""
STEPS = "fallback_steps"
"""Key of the number of fallback steps in a record."""


class FallbackStats:
    """Counts of fallback steps by reason, and the mean predicted overhead of the micro-batches since the last log.

    A fallback step has at least one fallback call: a call of a block that did not follow its plan. The step is counted
    once, under the most frequent reason of these calls.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Number of fallback calls (calls of blocks that did not follow their plans) in the current step, by reason."""
        self._overheads_ms: list[float] = []
        """Predicted overhead of each micro-batch since the last log."""
        self._last_ms: float | None = None
        """Value of `overhead_ms` in the last log, or None before the first log."""

    def add(self, overhead_ms: float, reasons: Mapping[str, int]) -> None:
        """Record a micro-batch: its predicted overhead, and the number of block calls that did not follow their plans,
        by reason."""
        self._overheads_ms.append(overhead_ms)
        self.reasons.update(reasons)

    def end_step(self, step: int, history: list[dict[str, Any]]) -> None:
        """Add the finished step to the counts in `history` if it was a fallback step."""
        if not self.reasons:
            return
        ((reason, _),) = self.reasons.most_common(1)
        self.reasons.clear()
        for record in history:
            if record["event"] == FALLBACK and record["reason"] == reason:
                record[STEPS] += 1
                return
        history.append({"step": step, "event": FALLBACK, "reason": reason, STEPS: 1})

    def logged(self) -> None:
        """Start a new mean of `overhead_ms`, because the previous mean was just logged."""
        self._last_ms = self.overhead_ms
        self._overheads_ms.clear()

    @property
    def overhead_ms(self) -> float | None:
        """Mean predicted overhead of the micro-batches since the last log.

        If no micro-batch has run since the last log, this is the mean at the last log, or None before the first log.
        """
        return sum(self._overheads_ms) / len(self._overheads_ms) if self._overheads_ms else self._last_ms


def full_recomputation(profile: Profile) -> Policy:
    """Return the policy that recomputes every block. The latest result is cached.

    The predictions of this policy estimate the cost of a batch under torch's checkpoint, and the cost of a batch whose
    operators differ from the profiled operators.
    """
    global _latest
    if _latest is None or _latest[0] is not profile:
        _latest = profile, uniform_policy(profile, Action.RECOMPUTE)
    return _latest[1]


_latest: tuple[Profile, Policy] | None = None


def ratio(shapes: Shapes | None, other: Shapes | None) -> float:
    """Return the size of a batch of `shapes` divided by the size of a batch of `other`.

    The size is the number of elements in the tensors that both batches have. Return 1.0 if either argument is None, or
    if the batches have no common tensor.
    """
    if shapes == other:
        return 1.0
    names = dict(shapes or ()).keys() & dict(other or ()).keys()
    elements, other_elements = (
        num_elements(tuple((name, size) for name, size in batch or () if name in names)) for batch in (shapes, other)
    )
    return elements / other_elements if elements and other_elements else 1.0


def num_fallback_steps(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of fallback steps of the run so far."""
    return sum(fallback_reasons(history).values())


def fallback_reasons(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of fallback steps by reason.

    Steps before the first policy have the reason BEFORE. The number of these steps comes from the history's record of
    the first policy.
    """
    counts: dict[str, int] = {}
    for record in history:
        if record.get(STEPS):
            reason = record["reason"] if record["event"] == FALLBACK else BEFORE
            counts[reason] = counts.get(reason, 0) + record[STEPS]
    return counts


def describe_fallbacks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of text on the fallback steps: a line with the number of steps, and a line for each reason.

    The result is empty if `history` is empty.
    """
    if not history:
        return []
    reasons, number = fallback_reasons(history), num_fallback_steps(history)
    if not reasons:
        return ["All steps followed their policies."]
    first = f"{number} {'step' if number == 1 else 'steps'} did not follow the policy, or not in all calls:"
    return [first, *(f"{steps}: {reason}" for reason, steps in reasons.items())]


def describe_costs(policy: Policy, profile: Profile | None) -> str:
    """Describe the actions of `policy` and, if a profile is given, memory and time relative to plain training."""
    if profile is None or not profile.plain_stored_bytes:
        return policy.summary()
    share = policy.predicted_stored_bytes / profile.plain_stored_bytes
    blocks_ms = plain_blocks_ms(profile)
    slowdown = f" (about {policy.predicted_overhead_ms / blocks_ms:+.0%} of the blocks' time)" if blocks_ms > 0 else ""
    host = f" and {format_bytes(policy.predicted_host_bytes)} in host memory" if policy.predicted_host_bytes else ""
    return (
        f"stores {format_bytes(policy.predicted_stored_bytes)}, {share:.0%} of plain training's "
        f"{format_bytes(profile.plain_stored_bytes)}{host}; predicted peak "
        f"{format_bytes(policy.predicted_peak_bytes)}, "
        f"{policy.predicted_overhead_ms:+.2f} ms per micro-batch{slowdown}; {policy.describe_actions()}"
    )


def describe_coverage(policy: Policy, profile: Profile | None, history: Sequence[Mapping[str, Any]]) -> str:
    """Describe how many block calls have an action for each activation, and how many steps followed `policy`.

    If a profile is given, also give the reason for block calls that run under torch's checkpoint.
    """
    counts = policy.block_counts()
    parts = [
        f"{counts[action.value]} {text}"
        for action, text in (
            (BlockAction.REPLAY, "with an action for each activation"),
            (BlockAction.CHECKPOINT, "under torch's checkpoint"),
            (BlockAction.PLAIN, "unchanged"),
        )
        if counts[action.value]
    ]
    parts += [f"{len(policy.idle_blocks)} without gradients"] if policy.idle_blocks else []
    reasons = sorted({kind.untrusted for kind in profile.kinds if kind.untrusted}) if profile is not None else []
    why = f" (not replayable: {'; '.join(reasons)})" if reasons else ""
    return " ".join([f"block calls per micro-batch: {', '.join(parts)}{why}.", *describe_fallbacks(history)])
