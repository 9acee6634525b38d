"""Figures of a run under one policy, which the training loop logs."""

from __future__ import annotations

from types import SimpleNamespace

from adacc_hf.adapt.fixed_policy_phase import FixedPolicyPhase


def figures(policy, profile, overhead_ms=None):
    """Return the figures of a policy that never changes."""
    stats = SimpleNamespace(overhead_ms=overhead_ms, logged=lambda: None)
    run = SimpleNamespace(active_policy=policy, profile=profile, stats=stats, fallback_figures=dict)
    return FixedPolicyPhase(run, None).figures({}, is_on_all_ranks=True)


def test_a_policy_without_a_profile_has_its_predictions(recomputing):
    assert figures(recomputing, None) == {
        "adacc/stored_gib": recomputing.predicted_stored_bytes / 2**30,
        "adacc/peak_gib": recomputing.predicted_peak_bytes / 2**30,
        "adacc/overhead_ms": recomputing.predicted_overhead_ms,
    }


def test_the_measured_overhead_comes_before_the_predicted_one_even_if_it_is_zero(recomputing):
    assert recomputing.predicted_overhead_ms > 0
    assert figures(recomputing, None, 0.0)["adacc/overhead_ms"] == 0.0
