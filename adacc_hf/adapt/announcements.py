"""Messages on a run's policy: the costs of the policy, and how much of the run followed the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.adapt.fallback_stats import describe_fallbacks
from adacc_hf.artifacts.memory_simulator import plain_blocks_ms
from adacc_hf.artifacts.policy import BlockAction, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes


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
