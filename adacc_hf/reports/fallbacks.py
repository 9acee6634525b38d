"""Steps that ran otherwise than the policy says: how many, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
