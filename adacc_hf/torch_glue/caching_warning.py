"""Filter for Transformers' warning that a key-value cache is incompatible with gradient checkpointing.

Blocks under a policy use the entry point of gradient checkpointing, so Transformers would warn about these blocks.
"""

from __future__ import annotations

import logging

from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import warning_once

_LOG = logging.getLogger(GradientCheckpointingLayer.__module__)


class CachingWarning(logging.Filter):
    """Log filter that drops this warning until `remove` is called."""

    def __init__(self) -> None:
        super().__init__()
        self._has_dropped = False
        _LOG.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        is_dropped = record.getMessage().startswith("Caching is incompatible with gradient checkpointing")
        self._has_dropped |= is_dropped
        return not is_dropped

    def remove(self) -> None:
        """Remove this log filter from Transformers' logger. Further calls have no effect."""
        _LOG.removeFilter(self)
        if self._has_dropped:
            # Transformers warns once. Let it warn again, for users who checkpoint layers of this class from now on.
            warning_once.cache_clear()
        self._has_dropped = False
