"""When a logged loss or gradient norm is suspicious. Only logged figures are read: that is after a synchronisation."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 16
"""Logged losses that a new one is compared with."""
MIN_LOSSES = 4
"""Logged losses before the first comparison: the median of fewer is one of them."""

NOISE = 4.0
"""Median distances from the median within which no loss is a spike: losses around zero, as in reinforcement learning,
are often many times their median. Of normal noise one in 300 lies above."""


class LossWatch:
    """Finds spikes and non-finite values among logged figures."""

    def __init__(self, spike: float, losses: Iterable[float] = ()) -> None:
        self.spike = spike
        self._losses: deque[float] = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def see(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """What is wrong with these figures, if anything."""
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        found = self._spike_of(loss) if len(self._losses) >= MIN_LOSSES else None
        # A spike too: a loss that stays where it rose to, on data of another kind, is normal half a window later.
        self._losses.append(loss)
        return found

    def _spike_of(self, loss: float) -> str | None:
        median = statistics.median(self._losses)
        spread = statistics.median(abs(other - median) for other in self._losses)
        if loss - median <= max((self.spike - 1.0) * abs(median), NOISE * spread):
            return None
        by = f"{loss / median:.1f} times" if median > 0 else f"far above {median:.4g},"
        return f"loss {loss:.4g} is {by} the median of the last {len(self._losses)}"
