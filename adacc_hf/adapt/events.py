"""Typed events of a run, as dicts for `AdaccSession` and for reports."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from adacc_hf.artifacts.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of a run, recorded in the history."""

    name: ClassVar[str]
    step: int
    """Number of finished steps at the time of the event. If the event occurs within a step, this step is counted
    too."""

    def to_record(self) -> dict[str, Any]:
        """Return the event as a dict of `step`, `event` (its name) and all other fields that are not None."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "step"}
        return {"step": self.step, "event": self.name, **{k: v for k, v in figures.items() if v is not None}}


@dataclass(frozen=True, kw_only=True)
class PolicySet(Event):
    """Event of the history: the first policy of the run, or of a size class (batches of similar sizes), is set."""

    name = "policy"
    stored_bytes: int
    peak_bytes: int
    overhead_ms: float
    host_bytes: int | None = None
    """Predicted bytes in host memory. None if the policy stores nothing in host memory."""
    fallback_steps: int | None = None
    """Number of steps under torch's checkpoint before the run's first policy."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyChanged(Event):
    """Event of the history: a newly solved policy replaces the policy of the run or of a size class."""

    name = "change"
    reason: str
    stored_bytes: int
    peak_bytes: int
    overhead_ms: float
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutliersTracked(Event):
    """Event of the history: outliers and errors measured in a tracking step, under the policy of one size class."""

    name = "tracking"
    reason: str
    num_outliers: dict[str, int]
    """Number of outlier channels by activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error by compressed activation."""
    compression_rate: float
    """Bytes that the policy stores for backward, divided by the bytes that plain training stores."""
    gradient_error: float | None = None
    gradient_cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryNoted(Event):
    """Event of the history about memory: the measured peak of a step, or another remark. The text is in `reason`."""

    name = "memory"
    reason: str | None = None
    measured_peak_bytes: int | None = None
    peak_bytes: int | None = None
    """Predicted peak of the step, in bytes."""
    corrected: bool | None = None
    """True if the profile's predicted memory was increased because the measured peak was higher."""
    stored_bytes: int | None = None
    overhead_ms: float | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GuardVerdict(Event):
    """Event of the history: result of a gradient check after a suspicious loss or a degraded gradient."""

    name = "guard"
    reason: str
    verdict: str


def predictions(policy: Policy) -> dict[str, Any]:
    """Return the predicted bytes and time of `policy`, keyed by the field names of events."""
    figures = {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
    }
    return figures | ({"host_bytes": policy.predicted_host_bytes} if policy.predicted_host_bytes else {})
