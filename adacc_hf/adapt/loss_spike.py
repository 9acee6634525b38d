"""LossSpikeDetector: finds spikes and values that are not finite among logged losses and gradient norms.

Only logged figures are read, because logging has synchronized with the device already.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 16
"""Number of earlier logged losses that a new one is compared with."""
MIN_LOSSES = 4
"""Fewest earlier losses for a comparison, because the median of fewer is close to a single loss."""

NOISE = 4.0
"""Largest distance of a normal loss from the median, in median absolute deviations. Losses around zero, as in
reinforcement learning, are often many times their median. Of normally distributed losses, one in 300 lies above."""


class LossSpikeDetector:
    """A detector of suspicious figures in training logs.

    A loss is a spike if its distance above the median of the last WINDOW losses exceeds their noise (NOISE) and
    `spike` - 1 times the median's absolute value.
    """

    def __init__(self, spike: float, losses: Iterable[float] = ()) -> None:
        self.spike = spike
        self._losses: deque[float] = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        """Latest logged losses, oldest first."""
        return list(self._losses)

    def check(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """Return the reason why the figures are suspicious, or None, and add `loss` to the earlier losses."""
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        reason = self._spike_reason(loss) if len(self._losses) >= MIN_LOSSES else None
        # Spikes are added too: a loss that stays high, as on other data, counts as normal after half a window.
        self._losses.append(loss)
        return reason

    def _spike_reason(self, loss: float) -> str | None:
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(other - median) for other in self._losses)
        if loss - median <= max((self.spike - 1.0) * abs(median), NOISE * deviation):
            return None
        comparison = f"{loss / median:.1f} times" if median > 0 else f"far above {median:.4g},"
        return f"loss {loss:.4g} is {comparison} the median of the last {len(self._losses)}"
