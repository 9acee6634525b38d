"""Times of training steps: of normal ones, and by how much longer the others take."""

from __future__ import annotations

import statistics
from collections import deque

MAX_STEPS = 64
"""Step times that are kept for a policy; the median of more is no better."""

COMPARED = 16
"""Normal steps that another one is compared with, the latest: a machine's speed drifts."""

ENOUGH = 4
"""Normal steps that are needed for that: the median of fewer is one of them."""


class StepTimes:
    """Of the steps at one size of batch."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        """Normal steps under the present plans."""
        self._latest: deque[float] = deque(maxlen=COMPARED)
        """Normal steps under any plans: another policy moves a step's time by far less than tracking does."""
        self._num_waiting, self._waiting_ms = 0, 0.0
        """Steps that could not be compared so far, and the time of all of them: none ever is where all are tracked."""

    @property
    def median_ms(self) -> float | None:
        """A normal step under the present plans; None if there was none."""
        return statistics.median(self.ms) if self.ms else None

    def start_over(self) -> None:
        """Other plans are followed from now on."""
        self.ms = []

    def add_normal(self, ms: float) -> float:
        """Keep a normal step's time; returns the extra time of earlier steps that can be compared only now."""
        self.ms = [*self.ms[1 - MAX_STEPS :], ms]
        self._latest.append(ms)
        return self._extra_ms()

    def add_other(self, ms: float) -> float:
        """By how much a step that was not normal took longer; 0 for now if too few normal ones are known.

        Below 0 if it was faster by chance: of many steps these are as many as were slower by chance.
        """
        self._num_waiting += 1
        self._waiting_ms += ms
        return self._extra_ms()

    def _extra_ms(self) -> float:
        if len(self._latest) < ENOUGH or not self._num_waiting:
            return 0.0
        extra_ms = self._waiting_ms - self._num_waiting * statistics.median(self._latest)
        self._num_waiting, self._waiting_ms = 0, 0.0
        return extra_ms
