"""Messages on the progress of a run, shown on stderr even if the program does not configure logging.

Python shows only warnings of a library. The logger `adacc_hf.progress` shows a few lines of information too: when
profiling starts, when a policy is set or changed, and how much of the run followed it. To switch them off, set the
logger's level: `logging.getLogger("adacc_hf.progress").setLevel(logging.WARNING)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.adapt.fallback_stats import describe_fallbacks, full_recomputation
from adacc_hf.artifacts.policy import BlockAction, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.distributed import is_first_rank

progress = logging.getLogger("adacc_hf.progress")


class _Fallback(logging.Handler):
    """Handler that writes to stderr, unless the root logger or the logger "adacc_hf" has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not logging.getLogger("adacc_hf").handlers:
            print(self.format(record), file=sys.stderr)


progress.setLevel(logging.INFO)
progress.addHandler(_Fallback())


def announce(text: str, *details: Any) -> None:
    """Log a message on the first rank. `text` is a %-format string for `details`."""
    if is_first_rank():
        progress.info(text, *details)


def describe_costs(policy: Policy, profile: Profile | None) -> str:
    """Describe the actions of `policy` and, if there is a profile, memory and time relative to plain training."""
    if profile is None or not profile.plain_stored_bytes:
        return policy.summary()
    plain_ms = profile.step_ms - full_recomputation(profile).predicted_overhead_ms
    share = policy.predicted_stored_bytes / profile.plain_stored_bytes
    slowdown = f" ({policy.predicted_overhead_ms / plain_ms:+.1%} of plain training's time)" if plain_ms > 0 else ""
    host = f" and {format_bytes(policy.predicted_host_bytes)} in host memory" if policy.predicted_host_bytes else ""
    return (
        f"stores {format_bytes(policy.predicted_stored_bytes)}, {share:.0%} of plain training's "
        f"{format_bytes(profile.plain_stored_bytes)}{host}; predicted peak "
        f"{format_bytes(policy.predicted_peak_bytes)}, "
        f"{policy.predicted_overhead_ms:+.2f} ms per micro-batch{slowdown}; {policy.describe_actions()}"
    )


def describe_coverage(policy: Policy, profile: Profile | None, history: Sequence[Mapping[str, Any]]) -> str:
    """Describe how many block calls have an action for each activation, and how many steps followed `policy`.

    For the block calls under torch's checkpoint, the text has the reasons from the profile, if there is a profile.
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
    return " ".join([f"block calls: {', '.join(parts)}{why}.", *describe_fallbacks(history)])
