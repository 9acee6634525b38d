"""FirstSteps: times of a run's first steps, for reports, with the time that training waited for profiling and
solving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from adacc_hf.torch_glue.progress import PROFILING, SOLVING, interruptions_since

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
