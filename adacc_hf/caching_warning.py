"""Transformers' warning that caching is incompatible with gradient checkpointing, where nobody asked for the latter.

A block's own flag is how a function gets around it (`blocks.py`), so Transformers takes it to be checkpointed, and says
in its log that it leaves the key-value cache out. It does so under any budget, and there is nothing to change about it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from torch import nn

from adacc_hf.compat import GradientCheckpointingLayer

_LOG = logging.getLogger(GradientCheckpointingLayer.__module__)
_TEXT = "Caching is incompatible with gradient checkpointing"


class CachingWarning(logging.Filter):
    """Keeps that warning from the log while it is on, if it is about a layer that `is_ours`; all else passes."""

    def __init__(self, is_ours: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_ours = is_ours
        self._has_kept = False
        _LOG.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` goes on; asked where it is logged, so that the layer is on the stack."""
        if not record.getMessage().startswith(_TEXT):
            return True
        frame = sys._getframe(1)
        while frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, GradientCheckpointingLayer):
                self._has_kept |= self._is_ours(layer)
                return not self._is_ours(layer)
            frame = frame.f_back
        return True

    def remove(self) -> None:
        """Let everything pass again. Harmless when called again."""
        _LOG.removeFilter(self)
        if self._has_kept:
            # It counts as said once, and whoever checkpoints layers of that class from now on has not seen it.
            logging.Logger.warning_once.cache_clear()
        self._has_kept = False
