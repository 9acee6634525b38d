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

SPOILED_ERROR = 0.5
"""Relative error from which compression is held to spoil a block's gradient. INT4 leaves about 0.1 (0.15 under eager
attention); at 0.5 the noise is half as long as the gradient."""


class LossWatch:
    """Finds spikes and non-finite values among logged figures."""

    def __init__(self, spike: float, losses: Iterable[float] = ()) -> None:
        self.spike = spike
        self._losses: deque[float] = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def see(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """What is wrong with these figures, if anything. A spike does not enter the median."""
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        if len(self._losses) >= MIN_LOSSES:
            median = statistics.median(self._losses)
            if median > 0 and loss > self.spike * median:
                return f"loss {loss:.4g} is {loss / median:.1f} times the median of the last {len(self._losses)}"
        self._losses.append(loss)
        return None
