"""Typed events of a run. Their records make up `AdaccSession.history` and the file that `adacc report` reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from adacc_hf.artifacts.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of a run, recorded in the history."""

    name: ClassVar[str]
    step: int
    """Number of finished steps at the time of the event. For an event within a step, the step's number."""

    def to_record(self) -> dict[str, Any]:
        """Return the event as a dict of `step`, `event` (its name) and the figures that are not None."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "step"}
        return {"step": self.step, "event": self.name, **{k: v for k, v in figures.items() if v is not None}}


@dataclass(frozen=True, kw_only=True)
class PolicySet(Event):
    """First policy of the run, or of a size class."""

    name = "policy"
    stored_bytes: int
    peak_bytes: int
    overhead_ms: float
    fallback_steps: int | None = None
    """Steps that ran under torch's checkpoint before the first policy."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyChanged(Event):
    """Replacement of a policy by a newly solved one."""

    name = "change"
    reason: str
    stored_bytes: int
    peak_bytes: int
    overhead_ms: float
    moved: str
    """Number of changed actions and of changed sets of outlier channels, as text."""
    waited_ms: float
    """Time that the step waited for the solver."""
    step_ms: float | None = None
    """Median time of a step under the earlier policy."""
    predicted_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutliersTracked(Event):
    """Result of a tracking step for the policy of one size class."""

    name = "tracking"
    reason: str
    num_outliers: dict[str, int]
    """Outlier channels by activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error by compressed activation."""
    compression_rate: float
    """Stored bytes over those of plain training."""
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    step_ms: float | None = None
    predicted_step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryNoted(Event):
    """Measured memory of a step, or a statement on memory in `reason`."""

    name = "memory"
    reason: str | None = None
    measured_peak_bytes: int | None = None
    peak_bytes: int | None = None
    """Predicted peak."""
    corrected: bool | None = None
    """True if the measured peak has changed the prices."""
    stored_bytes: int | None = None
    overhead_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class GuardVerdict(Event):
    """Verdict of the accuracy guard on a suspicious loss or gradient."""

    name = "guard"
    reason: str
    verdict: str


def predictions(policy: Policy) -> dict[str, Any]:
    """Return the predicted figures of `policy` under their names in events."""
    return {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
    }
