"""Texts on a run's policy: its costs, and how much of the run followed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adacc_hf import solve_policy
from adacc_hf.adapt.history import describe_costs, describe_coverage
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy


def test_costs_are_relative_to_plain_training(gpt2_like_profile: Any) -> None:
    profile = gpt2_like_profile(num_blocks=4)
    policy = solve_policy(profile, 0.5)
    text = describe_costs(policy, profile)
    plain = format_bytes(profile.plain_stored_bytes)
    assert f"stores {format_bytes(policy.predicted_stored_bytes)}, 50% of plain training's {plain}" in text
    full = uniform_policy(profile, "recompute").predicted_overhead_ms
    assert f"(about {policy.predicted_overhead_ms / (3 * full):+.0%} of the blocks' time)" in text
    slow = replace(profile, step_ms=1000 * profile.step_ms)
    assert describe_costs(policy, slow) == text, "the measured step also records its memory"
    assert describe_costs(policy, None) == policy.summary()


def test_coverage_names_what_could_not_be_replayed(gpt2_like_profile: Any) -> None:
    profile = gpt2_like_profile(num_blocks=4)
    history = [{"event": "policy", "step": 0}]
    text = describe_coverage(solve_policy(profile, 0.5), profile, history)
    assert (
        text == "block calls per micro-batch: 4 with an action for each activation. All steps followed their policies."
    )
    untrusted = replace(profile, kinds=tuple(replace(kind, untrusted="it draws numbers") for kind in profile.kinds))
    text = describe_coverage(checkpoint_policy(profile), untrusted, history)
    assert text.startswith(
        "block calls per micro-batch: 4 under torch's checkpoint (not replayable: it draws numbers)."
    )
