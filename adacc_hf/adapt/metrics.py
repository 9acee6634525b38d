"""Figures of a run's policy for the training's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile

if TYPE_CHECKING:
    from adacc_hf.adapt.controller import Controller


def metrics(
    policy: Policy, profile: Profile | None, controller: Controller | None, overhead_ms: float | None
) -> dict[str, float]:
    """Return the figures of the log, as AdaccCallback's docstring lists them.

    `overhead_ms` is the mean overhead of the micro-batches since the last log; None for the predicted one.
    """
    figures: dict[str, float | None] = {
        "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
        "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
        "adacc/overhead_ms": policy.predicted_overhead_ms if overhead_ms is None else overhead_ms,
    }
    if profile is not None:
        figures["adacc/compression_rate"] = policy.predicted_stored_bytes / profile.plain_stored_bytes
    if controller is not None:
        shown = controller.shown
        peak = shown.measured_peak_bytes
        figures["adacc/measured_peak_gib"] = None if peak is None else peak / 2**30
        is_exact = not shown.replanner.has_work()
        figures["adacc/error"] = 0.0 if is_exact else shown.error
        figures["adacc/gradient_error"] = 0.0 if is_exact else shown.gradient_error
        figures["adacc/tracking_ms"] = controller.context.extra_ms
    return {name: value for name, value in figures.items() if value is not None}
