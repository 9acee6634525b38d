"""Typed events of a run, and the times of its first steps, as dicts for `AdaccSession` and for reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from adacc_hf.artifacts.policy import Policy
from adacc_hf.torch_glue.progress import PROFILING, SOLVING, interruptions_since


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
    moved: str
    """Text with the number of activations whose action changed, and the number whose outlier channels changed."""
    waited_ms: float
    """Time in ms for which training waited for the solver."""
    host_bytes: int | None = None
    step_ms: float | None = None
    """Median time in ms of a step under the replaced policy."""
    predicted_step_ms: float | None = None


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
    step_ms: float | None = None
    predicted_step_ms: float | None = None


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


NUM_FIRST_STEPS = 12
"""Number of steps whose times are recorded. With the default settings, the first steps include the profile, the first
policy, the step whose memory is measured, and the first three tracking steps."""

CHECKPOINT = "torch's checkpoint"
FOLLOWING = "policy"
CHECKING = "policy, records of blocks checked"
MEASURING = "policy, memory measured"
TRACKING = "policy, outliers and gradients measured"
COMPILING = "graphs are compiled"
COMPILED = "compiled graphs"
"""Activity of a step that ran compiled graphs. This constant and the constants above are all values of a step's
activity, which describes how the blocks ran, and the step's work in addition to training."""

EVENTS = {"policy": "policy set", "change": "policy changed", "guard": "guard"}
"""Events of the run's history that the report shows next to a step's times, with the text in the report."""

RECORD_KEYS = frozenset({"step", "activity", "seconds", "profiling_s", "solving_s", "events"})
"""Keys of each record in `FirstSteps.records`."""


class FirstSteps:
    """Times of a run's first steps.

    A step's time includes its interruptions: profiling, and solving or waiting for the solver. A step's *activity* is
    one of this module's constants, such as COMPILED. It describes how the blocks ran in the step (under a policy, for
    example), and the step's work in addition to training.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        """One record per finished step, at most NUM_FIRST_STEPS: `step` (its number, from 1 on), `activity` (how the
        blocks ran), `seconds` (its whole time), `profiling_s` and `solving_s` (seconds of profiling and solving in this
        time), and `events` (events of the history in this step)."""
        self._started: float | None = None
        self._num_events = 0
        """Length of the run's history when the step began."""

    @property
    def is_complete(self) -> bool:
        return len(self.records) >= NUM_FIRST_STEPS

    def begin_step(self, history: Sequence[dict[str, Any]]) -> None:
        """Begin to time a step, unless the times of all first steps are recorded already."""
        if not self.is_complete:
            self._started, self._num_events = time.perf_counter(), len(history)

    def end_step(self, step: int, activity: str, history: Sequence[dict[str, Any]]) -> bool:
        """Record the time of step number `step` and its activity (how the blocks ran), and return True.

        Return False if the step was not timed.
        """
        if self._started is None:
            return False
        seconds = time.perf_counter() - self._started
        waits = dict.fromkeys((PROFILING, SOLVING), 0.0)
        for interruption in interruptions_since(self._started):
            waits[interruption.kind] += interruption.seconds
        events = [record["event"] for record in history[self._num_events :] if record["event"] in EVENTS]
        self.records.append(
            {
                "step": step,
                "activity": activity,
                "seconds": seconds,
                "profiling_s": waits[PROFILING],
                "solving_s": waits[SOLVING],
                "events": events,
            }
        )
        self._started = None
        return True
