"""Filter for Transformers' warning that a key-value cache is incompatible with gradient checkpointing.

Blocks under a policy use the entry point of gradient checkpointing, so Transformers would warn about these blocks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import warning_once

_LOG = logging.getLogger(GradientCheckpointingLayer.__module__)
_CACHING_WARNING = "Caching is incompatible with gradient checkpointing"


class CachingWarning(logging.Filter):
    """Log filter that drops Transformers' warning that a key-value cache is incompatible with gradient checkpointing.

    Only warnings about layers for which `is_ours(layer)` returns True are dropped.
    """

    _has_dropped = False
    """True if any filter of this class has dropped a warning. The flag is a class attribute, because if there are
    several filters, only the first one sees each record."""

    def __init__(self, is_ours: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_ours = is_ours
        _LOG.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False, so that logging drops `record`, if `record` is the caching warning of a layer for which
        `is_ours` is True.

        logging calls this method inside the call that logs `record`, so the layer is found on the call stack.
        """
        if not record.getMessage().startswith(_CACHING_WARNING):
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != GradientCheckpointingLayer.__module__:
            frame = frame.f_back
        # Reading `f_locals` copies the frame's variables into a dict that lives as long as the frame's call. A copy of
        # the training loop's frame would keep its batch alive.
        layer = None if frame is None else frame.f_locals.get("self")
        if not isinstance(layer, GradientCheckpointingLayer):
            return True
        is_ours = self._is_ours(layer)
        CachingWarning._has_dropped |= is_ours
        return not is_ours

    def remove(self) -> None:
        """Remove this log filter from Transformers' logger. Further calls have no effect."""
        _LOG.removeFilter(self)
        if CachingWarning._has_dropped:
            # Transformers warns once. Let it warn again, for users who checkpoint layers of this class from now on.
            warning_once.cache_clear()
        CachingWarning._has_dropped = False
