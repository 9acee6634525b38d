"""What the Trainer's clipping and optimizer step take for a while, seen in one of the run's own steps."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import TrainingArguments

from adacc_hf.profiling.optimizer_memory import OptimizerMeter, measure_clipping

log = logging.getLogger(__name__)


class OptimizerWatch:
    """Counts between the Trainer's on_pre_optimizer_step and on_optimizer_step."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Most bytes that clipping or the step took beside parameters, gradients and state; 0 until it was seen."""
        self.has_seen = False
        """Whether a step was seen, or it was found that none can be."""
        self._meter: OptimizerMeter | None = None

    def begin(self, args: TrainingArguments, model: nn.Module) -> None:
        """The optimizer is about to step. Gradients were clipped already, so that is done again, without effect."""
        self.has_seen = True
        device = next(model.parameters()).device
        if device.type == "cpu" and torch.autograd.profiler._is_profiler_enabled:
            log.info("Adacc: another profiler is at work: the optimizer's temporary memory is not in the plan")
            return
        if args.max_grad_norm:
            self.nbytes = max(self.nbytes, measure_clipping(model.parameters()))
        self._meter = OptimizerMeter(device)
        self._meter.__enter__()

    def end(self) -> None:
        """The optimizer has stepped. Harmless when nothing is counted."""
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.nbytes = max(self.nbytes, self._meter.nbytes)
        self._meter = None
