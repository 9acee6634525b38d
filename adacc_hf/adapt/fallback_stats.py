"""FallbackStats: counts fallback steps during a run. DivergedBatches: counts micro-batches that did not follow plans.

A fallback step is a step in which at least one call of a block did not follow a policy. The counts are stored in
records of the run's history. The functions at the end of this module read the counts for the Trainer's log and the
reports.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements

if TYPE_CHECKING:
    from adacc_hf.adapt.size_policy import SizePolicy

log = logging.getLogger(__name__)

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
        self._early_shapes: list[BatchShapes | None] = []
        """Shapes of the micro-batches that ran since the last log and before the first policy was set."""
        self._last_ms: float | None = None
        """Value of `overhead_ms` in the last log, or None before the first log."""

    def add_early(self, shapes: BatchShapes | None) -> None:
        """Record a micro-batch that ran under full recomputation, before there was a policy."""
        self._early_shapes.append(shapes)

    def add(self, overhead_ms: float, reasons: Mapping[str, int]) -> None:
        """Record a micro-batch: its predicted overhead, and the number of block calls that did not follow their plans,
        by reason."""
        self._overheads_ms.append(overhead_ms)
        self.reasons.update(reasons)

    def estimate_early_overheads(self, profile: Profile | None, shapes: BatchShapes | None) -> None:
        """Add estimates for the early micro-batches, which ran before the first policy, to the overheads of the run.

        The estimates come from `profile`, which was made for a batch of `shapes`. If `profile` is None, the early
        micro-batches are left out of the run's mean overhead.
        """
        if self._early_shapes and profile is not None:
            profiled_ms = full_recomputation(profile).predicted_overhead_ms
            self._overheads_ms += [profiled_ms * ratio(early, shapes) for early in self._early_shapes]
        self._early_shapes.clear()

    def end_step(self, step: int, history: list[dict[str, Any]]) -> bool:
        """If the finished step was a fallback step, add it to the counts in `history`.

        Return True if the step was a fallback step.
        """
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
        """Start a new mean of `overhead_ms`, because the previous mean was just logged."""
        self._last_ms = self.overhead_ms
        self._overheads_ms.clear()
        self._early_shapes.clear()

    @property
    def overhead_ms(self) -> float | None:
        """Mean predicted overhead of the micro-batches since the last log.

        If no micro-batch has run since the last log, this is the mean at the last log, or None before the first log.
        """
        return sum(self._overheads_ms) / len(self._overheads_ms) if self._overheads_ms else self._last_ms


class DivergedBatches:
    """Counts and cost estimates of micro-batches whose block calls diverged from their plans during the run.

    A call diverges if it runs under torch's checkpoint instead of its plan, or if it runs operators that were not
    profiled. The time of a diverged call is estimated as the time of full recomputation. In the methods, `reference` is
    the policy (SizePolicy) whose profile is closest to a micro-batch of `shapes`, and `say` is a function that adds a
    sentence to the run's history.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.has_diverged = False
        """True if most calls of the most recent micro-batch diverged."""
        self._say = say
        self._num_batches = self._num_diverged = 0
        """Numbers of micro-batches since the last call of `most_diverged`: of all, and of those in which most block
        calls did not follow their plan."""
        self._reported = 0
        """Largest report that `_report_excess` has logged in this run. 1: a batch under torch's checkpoint may exceed
        the budget. 2: a batch of operators that were not profiled may exceed the budget. 3: a batch is predicted to
        exceed the budget."""

    def add(self, share: float) -> None:
        """Record a micro-batch in which the fraction `share` of the block calls diverged from their plans."""
        self.has_diverged = share > 0.5
        self._num_batches += 1
        self._num_diverged += self.has_diverged

    def most_diverged(self) -> bool:
        """Return True if, in most micro-batches since the last call of this method, most block calls diverged from
        their plans."""
        is_majority = 2 * self._num_diverged > self._num_batches
        self._num_batches = self._num_diverged = 0
        return is_majority

    def overhead_ms(
        self, shapes: BatchShapes, reference: SizePolicy, budget: Budget, ran_planned: bool = False
    ) -> float:
        """Return the predicted overhead in ms of a micro-batch whose block calls all diverged from the policy.

        Once per run, report that such batches may exceed the budget. If `ran_planned`, the report is a warning: some
        calls ran under plans that were made for operators outside the profile, and the memory of these operators is not
        predicted. If this batch is predicted to exceed the budget, report the excess, also once per run.
        """
        if budget.limits_peak:
            peak = recomputing_peak_bytes(shapes, reference)
            self._report_excess(shapes, max(0, peak - budget.nbytes), budget.setting, ran_planned)
        return full_recomputation(reference.profile).predicted_overhead_ms * ratio(shapes, reference.shapes)

    def _report_excess(
        self, shapes: BatchShapes, excess_bytes: int, memory_budget: str | float | int, ran_planned: bool
    ) -> None:
        has_excess = excess_bytes > 0
        report = 3 if has_excess else 2 if ran_planned else 1
        if report <= self._reported:
            return
        self._reported = report
        amount = f"takes up to about {excess_bytes} bytes" if has_excess else "may take"
        text = (
            f"a batch of {describe(shapes)} did not follow a policy, and {amount} more than memory_budget="
            f"{memory_budget!r} allows: to avoid this, set dataloader_drop_last=True, or pad all batches to one length"
        )
        log.log(logging.INFO if report == 1 else logging.WARNING, "Adacc: %s", text)
        self._say(text)


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


def recomputing_peak_bytes(shapes: BatchShapes, reference: SizePolicy) -> int:
    """Return the estimated peak of a batch of `shapes` under full recomputation, from the profile of `reference`."""
    static_bytes = reference.profile.static_bytes
    above_static = full_recomputation(reference.profile).predicted_peak_bytes - static_bytes
    return int(static_bytes + ratio(shapes, reference.shapes) * above_static)


def ratio(shapes: BatchShapes | None, other: BatchShapes | None) -> float:
    """Return the size of a batch of `shapes` divided by the size of a batch of `other`.

    The size is the number of elements in the tensors that both batches have. Return 1.0 if either argument is None, or
    if the batches have no common tensor.
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
