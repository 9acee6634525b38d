"""Looks at optimizers while they step: whether one does so out of sight, and what a step takes for a while."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.errors import ProfilerAtWorkError
from adacc_hf.price.optimizer_memory import OptimizerMeter, measure_clipping
from adacc_hf.torch_glue.private import is_profiling

log = logging.getLogger(__name__)


class InnerSteps:
    """Notes whether any of torch's optimizers steps while it is open: under DeepSpeed, or layer by layer."""

    def __init__(self) -> None:
        self.were_seen = False
        self.expected: Any = None
        """The optimizer whose steps are no news: in a loop of the user's own they may come within a micro-batch."""
        self._hook: Any = None

    def open(self) -> None:
        """Look from now on. Harmless when open already."""
        self.close()
        self._hook = register_optimizer_step_pre_hook(self._see)

    def close(self) -> None:
        """Look no more. Harmless when not open."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _see(self, optimizer: Any, *_: Any) -> None:
        self.were_seen |= optimizer is not self.expected


class OptimizerWatch:
    """Counts what one step of a run's optimizer takes."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Most bytes that clipping or the step took beside parameters, gradients and state; 0 until it was seen."""
        self.has_seen = False
        """Whether a step was seen, or it was found that none can be."""
        self.meter: OptimizerMeter | None = None
        """While a step is looked at."""

    def begin(self, clips: bool, model: nn.Module) -> None:
        """The optimizer is about to step. If the loop `clips` gradients it has done so, and it is done again, without
        effect."""
        self.has_seen = True
        device = next(model.parameters()).device
        if device.type == "cpu" and is_profiling():
            log.info("Adacc: another profiler is at work: the optimizer's temporary memory is not in the plan")
            return
        if clips:
            self.nbytes = max(self.nbytes, measure_clipping(model.parameters()))
        meter = OptimizerMeter(device)
        meter.__enter__()
        self.meter = meter

    def end(self) -> None:
        """The optimizer has stepped. Harmless when nothing is counted."""
        if self.meter is not None:
            with suppress(ProfilerAtWorkError):
                self.meter.__exit__(None, None, None)
            self.nbytes = max(self.nbytes, self.meter.nbytes)
        self.meter = None
