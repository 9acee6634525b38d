"""Typed events of a run. `AdaccSession.history`, and the file that `adacc report` reads, contain the events as
records."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from adacc_hf.artifacts.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of a run, recorded in the history."""

    name: ClassVar[str]
    step: int
    """Number of finished steps at the time of the event. For an event within a step, the number of this step."""

    def to_record(self) -> dict[str, Any]:
        """Return the event as a dict of `step`, `event` (its name) and all other fields that are not None."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "step"}
        return {"step": self.step, "event": self.name, **{k: v for k, v in figures.items() if v is not None}}


@dataclass(frozen=True, kw_only=True)
class PolicySet(Event):
    """Event of the history: a first policy is set, for the run or for a size class."""

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
    """Event of the history: a newly solved policy replaces a policy."""

    name = "change"
    reason: str
    stored_bytes: int
    peak_bytes: int
    overhead_ms: float
    moved: str
    """Number of changed actions and of changed sets of outlier channels, as text."""
    waited_ms: float
    """Time in ms for which training waited for the solver."""
    host_bytes: int | None = None
    step_ms: float | None = None
    """Median time in ms of a step under the replaced policy."""
    predicted_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutliersTracked(Event):
    """Event of the history: measurements of a tracking step, for the policy of one size class."""

    name = "tracking"
    reason: str
    num_outliers: dict[str, int]
    """Number of outlier channels by activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error by compressed activation."""
    compression_rate: float
    """Stored bytes divided by the stored bytes of plain training."""
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    step_ms: float | None = None
    predicted_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryNoted(Event):
    """Event of the history: the measured peak memory of a step, or a remark about memory, in `reason`."""

    name = "memory"
    reason: str | None = None
    measured_peak_bytes: int | None = None
    peak_bytes: int | None = None
    """Predicted peak of the step, in bytes."""
    corrected: bool | None = None
    """True if the predicted memory was corrected because of the measured peak."""
    stored_bytes: int | None = None
    overhead_ms: float | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GuardVerdict(Event):
    """Event of the history: the accuracy guard's verdict after a suspicious loss or a degraded gradient."""

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
