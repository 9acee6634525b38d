"""Figures of a policy and of how training goes under it, for the Trainer's log and the run's history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adacc_hf.callbacks.situations import Situation
from adacc_hf.policy import Policy
from adacc_hf.profile import Profile
from adacc_hf.rectifier import Tracking

if TYPE_CHECKING:
    from adacc_hf.callbacks.evolution import Evolution


def predictions(policy: Policy) -> dict[str, float]:
    return {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
    }


def tracking_figures(situation: Situation, found: Tracking) -> dict[str, Any]:
    """What a tracking step found, beside how training went until then."""
    rectifier = situation.rectifier
    figures: dict[str, Any] = {
        "reason": found.reason,
        "num_outliers": found.num_outliers,
        "errors": found.errors,
        "compression_rate": rectifier.policy.predicted_stored_bytes / rectifier.profile.plain_stored_bytes,
    }
    if found.gradients:
        figures["gradient_error"] = max(gradient.error for gradient in found.gradients.values())
        figures["gradient_cosine"] = min(gradient.cosine for gradient in found.gradients.values())
    return figures | step_times(situation)


def step_times(situation: Situation) -> dict[str, float]:
    """Measured and predicted time of a step under the present policy, as far as they are known."""
    times = {"step_ms": situation.times.median_ms, "predicted_step_ms": situation.predicted_step_ms}
    return {name: value for name, value in times.items() if value is not None}


def moved(before: Policy, after: Policy) -> tuple[int, int]:
    """How many activations of all blocks have another action or codec, and how many another number of channels."""
    actions = channels = 0
    for block, _ in before.blocks:
        old = dict(before.plan_of(block).choices)
        for value, choice in after.plan_of(block).choices:
            was = old.get(value, choice)
            actions += (was.action, was.codec) != (choice.action, choice.codec)
            channels += (was.action, was.codec) == (choice.action, choice.codec) and was.options != choice.options
    return actions, channels


def metrics(
    policy: Policy, profile: Profile | None, evolution: Evolution | None, overhead_ms: float | None
) -> dict[str, float]:
    """What the Trainer's log gets; `overhead_ms` is that of what has run."""
    found: dict[str, float | None] = {
        "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
        "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
        "adacc/overhead_ms": policy.predicted_overhead_ms if overhead_ms is None else overhead_ms,
    }
    if profile is not None:
        found["adacc/compression_rate"] = policy.predicted_stored_bytes / profile.plain_stored_bytes
    if evolution is not None:
        shown = evolution.shown
        peak = shown.measured_peak_bytes
        found["adacc/measured_peak_gib"] = None if peak is None else peak / 2**30
        is_exact = not shown.rectifier.has_work()
        found["adacc/error"] = 0.0 if is_exact else shown.error
        found["adacc/gradient_error"] = 0.0 if is_exact else shown.gradient_error
        found["adacc/tracking_ms"] = evolution.tracking_ms
    return {name: value for name, value in found.items() if value is not None}
