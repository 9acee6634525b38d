"""History of a run: records of its events, and texts for logs and reports.

A record is a dict of `step` (number of finished steps, with the current one), `event`, and the event's own figures:

| event | what happened | figures besides `reason` |
|---|---|---|
| policy | the first policy of the run, or of a size class, is set | `predictions`, fallback_steps |
| change | a newly solved policy replaces another one | `predictions` |
| tracking | outliers and errors were measured | num_outliers, errors, gradient_error, compression_rate |
| memory | the peak of a step was measured, or another remark | measured_peak_bytes, peak_bytes, corrected |
| guard | gradients were checked after a suspicious loss, or are degraded | verdict |
| fallback | steps did not follow a policy for one reason | fallback_steps |

A fallback step has at least one call of a block that did not follow a policy. It is counted once, under the most
frequent reason of these calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.artifacts.memory_simulator import plain_blocks_ms
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes

NO_POLICY = "full recomputation, because there is no policy for batches of this size"
UNCOMPILED = "a forward without compiled graphs, which has no budget"
BEFORE = "full recomputation, before there was a policy"
"""Reason of the fallback steps before the run's first policy. The constants above are reasons of later ones."""

FALLBACK, STEPS = "fallback", "fallback_steps"
"""Event of the records that count fallback steps, and the key of their number."""


def predictions(policy: Policy) -> dict[str, Any]:
    """Return the predicted bytes and time of `policy`, by their names in the history."""
    return {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
        "host_bytes": policy.predicted_host_bytes or None,
    }


def fallback_reasons(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of fallback steps by reason. The record of the first policy counts those with reason BEFORE."""
    counts: dict[str, int] = {}
    for record in history:
        if record.get(STEPS):
            reason = record["reason"] if record["event"] == FALLBACK else BEFORE
            counts[reason] = counts.get(reason, 0) + record[STEPS]
    return counts


def describe_fallbacks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of text on the fallback steps: their number, and one line for each reason. [] without a history."""
    if not history:
        return []
    reasons = fallback_reasons(history)
    if not reasons:
        return ["All steps followed their policies."]
    number = sum(reasons.values())
    first = f"{number} {'step' if number == 1 else 'steps'} did not follow the policy, or not in all calls:"
    lines = [first, *(f"{steps}: {reason}" for reason, steps in reasons.items())]
    return lines if len(reasons) > 1 else [f"{first} {next(iter(reasons))}"]


def describe_costs(policy: Policy, profile: Profile | None) -> str:
    """Describe the actions of `policy` and, if a profile is given, memory and time relative to plain training, and why
    blocks cannot be replayed."""
    if profile is None or not profile.plain_stored_bytes:
        return policy.summary()
    share = policy.predicted_stored_bytes / profile.plain_stored_bytes
    blocks_ms = plain_blocks_ms(profile)
    slowdown = f" (about {policy.predicted_overhead_ms / blocks_ms:+.0%} of the blocks' time)" if blocks_ms > 0 else ""
    reasons = "; ".join(sorted({kind.untrusted for kind in profile.kinds if kind.untrusted}))
    host = f" and {format_bytes(policy.predicted_host_bytes)} in host memory" if policy.predicted_host_bytes else ""
    return (
        f"stores {format_bytes(policy.predicted_stored_bytes)}, {share:.0%} of plain training's "
        f"{format_bytes(profile.plain_stored_bytes)}{host}; predicted peak "
        f"{format_bytes(policy.predicted_peak_bytes)}, "
        f"{policy.predicted_overhead_ms:+.2f} ms per micro-batch{slowdown}; {policy.describe_actions()}"
        f"{f'. Blocks that cannot be replayed: {reasons}' if reasons else ''}"
    )
