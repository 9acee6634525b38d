"""FallbackStats: counts of a run's fallback steps, and the predicted overhead of its micro-batches.

A fallback step is a step in which at least one call of a block did not follow a policy. The counts are records of the
run's history, which the functions below read for the Trainer's log and the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, num_elements

NO_POLICY = "full recomputation, because there is no policy for batches of this size"
UNCOMPILED = "a forward without compiled graphs, which no budget bounds"
BEFORE = "full recomputation, before there was a policy"
"""Reasons of fallback steps."""

FALLBACK = "fallback"
"""Event of the history's records that count fallback steps."""
STEPS = "fallback_steps"
"""Key of the number of fallback steps in a record."""


class FallbackStats:
    """Counts of fallback steps by reason, and the mean predicted overhead of the micro-batches since the last log.

    Each fallback step is counted once, for the reason that most of its fallback calls had.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Fallback calls of the current step, by reason."""
        self._overheads_ms: list[float] = []
        """Predicted overhead of each micro-batch since the last log."""
        self._early_shapes: list[BatchShapes | None] = []
        """Shapes of the micro-batches since the last log that ran before there was a policy."""
        self._last_ms: float | None = None
        """`overhead_ms` at the last log."""

    def add_early(self, shapes: BatchShapes | None) -> None:
        """Record a micro-batch that ran under full recomputation, before there was a policy."""
        self._early_shapes.append(shapes)

    def add(self, overhead_ms: float, reasons: Mapping[str, int]) -> None:
        """Record a micro-batch: its predicted overhead, and its number of fallback calls by reason."""
        self._overheads_ms.append(overhead_ms)
        self.reasons.update(reasons)

    def estimate_early_overheads(self, profile: Profile | None, shapes: BatchShapes | None) -> None:
        """Estimate the overhead of the early micro-batches, which ran before the first policy.

        `profile` was made for a batch of `shapes`.
        """
        if self._early_shapes and profile is not None:
            profiled_ms = full_recomputation(profile).predicted_overhead_ms
            self._overheads_ms += [profiled_ms * ratio(early, shapes) for early in self._early_shapes]
        self._early_shapes.clear()

    def end_step(self, step: int, history: list[dict[str, Any]]) -> bool:
        """Count the finished step in `history` if it was a fallback step. Return True if so."""
        if not self.reasons:
            return False
        ((reason, _),) = self.reasons.most_common(1)
        self.reasons.clear()
        for record in history:
            if record["event"] == FALLBACK and record["reason"] == reason:
                record[STEPS] += 1
                return True
        history.append({"step": step, "event": FALLBACK, "reason": reason, STEPS: 1})
        return True

    def logged(self) -> None:
        """Begin a new mean of `overhead_ms`, after a log."""
        self._last_ms = self.overhead_ms
        self._overheads_ms.clear()
        self._early_shapes.clear()

    @property
    def overhead_ms(self) -> float | None:
        """Mean predicted overhead of the micro-batches since the last log.

        If there was no micro-batch, the value at the last log. None before the first log.
        """
        return sum(self._overheads_ms) / len(self._overheads_ms) if self._overheads_ms else self._last_ms


def full_recomputation(profile: Profile) -> Policy:
    """Return the policy that recomputes every block.

    Its predictions estimate what a batch like the profiled one costs under torch's checkpoint, or if its operators
    differ from the profiled ones and run with the least memory.
    """
    return uniform_policy(profile, Action.RECOMPUTE)


def ratio(shapes: BatchShapes | None, other: BatchShapes | None) -> float:
    """Return the size of a batch of `shapes` relative to a batch of `other`, in elements of their common tensors.

    Return 1.0 if either is None or they have no common tensor.
    """
    if shapes == other:
        return 1.0
    names = {shape.name for shape in shapes or ()} & {shape.name for shape in other or ()}
    elements, other_elements = (
        num_elements(tuple(shape for shape in batch or () if shape.name in names)) for batch in (shapes, other)
    )
    return elements / other_elements if elements and other_elements else 1.0


def num_fallback_steps(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of fallback steps of the run so far."""
    return sum(fallback_reasons(history).values())


def fallback_reasons(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of fallback steps by reason.

    Steps before the first policy are counted in the record of the event that set it, under the reason BEFORE.
    """
    counts: dict[str, int] = {}
    for record in history:
        if record.get(STEPS):
            reason = record["reason"] if record["event"] == FALLBACK else BEFORE
            counts[reason] = counts.get(reason, 0) + record[STEPS]
    return counts


def describe_fallbacks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence with the number of fallback steps, and one for each reason. Empty without a history."""
    if not history:
        return []
    reasons, number = fallback_reasons(history), num_fallback_steps(history)
    if not reasons:
        return ["All steps followed their policies."]
    first = f"{number} {'step' if number == 1 else 'steps'} did not follow the policy, or not in all calls:"
    return [first, *(f"{steps}: {reason}" for reason, steps in reasons.items())]
