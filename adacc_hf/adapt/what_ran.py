"""What the micro-batches and steps of a run really ran under, for the Trainer's log and the run's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.batch_shapes import BatchShapes, num_elements

NO_POLICY = "full recomputation, as no policy is for batches of their size"
UNCOMPILED = "a forward without compiled graphs, under no budget"


class WhatRan:
    """Counts the steps of which some call ran otherwise than a policy says, and adds up what policies cost.

    Each such step is counted once, under the reason that most of its calls had, in a record of the run's history.
    """

    def __init__(self) -> None:
        self._why: Counter[str] = Counter()
        """Why calls of the step ran otherwise."""
        self._ms: list[float] = []
        """Predicted overhead of the micro-batches since the last log."""
        self._early: list[BatchShapes | None] = []
        """Those of them that ran before there was a policy."""
        self._last_ms: float | None = None

    def ran_early(self, shapes: BatchShapes | None) -> None:
        """A micro-batch ran under full recomputation, before there was a policy."""
        self._early.append(shapes)

    def ran(self, overhead_ms: float, why: Mapping[str, int]) -> None:
        """A micro-batch ran, of which so many calls were otherwise than the policy says, by why."""
        self._ms.append(overhead_ms)
        self._why.update(why)

    def policy_is_set(self, profile: Profile | None, shapes: BatchShapes | None) -> None:
        """The early micro-batches are known to have cost what `profile`, of a batch of `shapes`, says."""
        if self._early and profile is not None:
            whole_ms = full_recomputation(profile).predicted_overhead_ms
            self._ms += [whole_ms * ratio(early, shapes) for early in self._early]
        self._early.clear()

    def step_ends(self, step: int, history: list[dict[str, Any]]) -> bool:
        """Count the step; returns whether history has changed."""
        if not self._why:
            return False
        ((why, _),) = self._why.most_common(1)
        self._why.clear()
        for record in history:
            if record["event"] == FALLBACK and record["reason"] == why:
                record[STEPS] += 1
                return True
        history.append({"step": step, "event": FALLBACK, "reason": why, STEPS: 1})
        return True

    def logged(self) -> None:
        """The micro-batches to come belong to the next log."""
        self._last_ms = self.overhead_ms
        self._ms.clear()
        self._early.clear()

    @property
    def overhead_ms(self) -> float | None:
        """Mean over the micro-batches since the last log; the last log's if there was none; None before any."""
        return sum(self._ms) / len(self._ms) if self._ms else self._last_ms


def full_recomputation(profile: Profile) -> Policy:
    """What torch's checkpoint, or a path with the least memory, comes to for a batch as the profiled one."""
    return Policy.uniform(profile, Action.RECOMPUTE)


def ratio(shapes: BatchShapes | None, other: BatchShapes | None) -> float:
    """How much larger a batch of `shapes` is than one of `other`; 1 where either is not known."""
    if shapes == other:
        return 1.0
    names = {shape.name for shape in shapes or ()} & {shape.name for shape in other or ()}
    mine, theirs = (num_elements(tuple(s for s in each or () if s.name in names)) for each in (shapes, other))
    return mine / theirs if mine and theirs else 1.0


# Steps that ran otherwise than the policy says: how many, and why.

FALLBACK = "fallback"
"""The event of a run's history that counts such steps."""
STEPS = "fallback_steps"
BEFORE = "full recomputation, before there was a policy"


def num_fallback_steps(history: Sequence[Mapping[str, Any]]) -> int:
    """Steps of the run so far that ran, all or in part, otherwise than a policy says."""
    return sum(fallback_reasons(history).values())


def fallback_reasons(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many there were by why; what sets the first policy tells of the steps before it."""
    found: dict[str, int] = {}
    for record in history:
        if record.get(STEPS):
            why = record["reason"] if record["event"] == FALLBACK else BEFORE
            found[why] = found.get(why, 0) + record[STEPS]
    return found


def describe_fallbacks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on how many there were, and one on each reason; none without a history."""
    if not history:
        return []
    reasons, number = fallback_reasons(history), num_fallback_steps(history)
    if not reasons:
        return ["All steps ran under their policies."]
    begins = f"{number} {'step' if number == 1 else 'steps'} ran otherwise than the policy says, all or in part:"
    return [begins, *(f"{steps}: {why}" for why, steps in reasons.items())]
