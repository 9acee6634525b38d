"""InnerSteps: detects optimizer steps within a micro-batch. OptimizerProbe: measures an optimizer step's memory."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.price.optimizer_memory import OptimizerMeter, measure_clipping
from adacc_hf.torch_glue.private import is_profiling

log = logging.getLogger(__name__)


class InnerSteps:
    """A detector of optimizer steps within a micro-batch, such as the steps of DeepSpeed's optimizers.

    Steps are detected from `open` to `close`.
    """

    def __init__(self) -> None:
        self.has_detected = False
        self.expected: Any = None
        """The session's own optimizer, whose steps are ignored: a user's loop may call this optimizer within a
        micro-batch."""
        self.hook: Any = None
        """Handle of the registered hook between `open` and `close`, else None."""

    def open(self) -> None:
        """Begin to detect optimizer steps. Do nothing if detection has begun already."""
        self.close()
        self.hook = register_optimizer_step_pre_hook(self._see)

    def close(self) -> None:
        """Stop detecting optimizer steps. Do nothing if detection has not begun."""
        if self.hook is not None:
            self.hook.remove()
        self.hook = None

    def _see(self, optimizer: Any, *_: Any) -> None:
        self.has_detected |= optimizer is not self.expected


class OptimizerProbe:
    """A meter of the temporary memory of one optimizer step, and of gradient clipping before the step."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Peak temporary bytes of gradient clipping and the optimizer's step, without parameters, gradients and state.

        0 if no step was measured."""
        self.has_seen = False
        """True once a step was measured, or could not be measured because another profiler was active."""
        self.meter: OptimizerMeter | None = None
        """The running meter while an optimizer step is measured, else None."""

    def begin(self, clips: bool, model: nn.Module) -> None:
        """Begin to measure the optimizer's step.

        If the loop clips gradients (`clips` is True), the gradients were clipped before this call. The memory of
        clipping is therefore measured by computing the norm for clipping once more, which does not change the
        gradients.
        """
        self.has_seen = True
        device = next(model.parameters()).device
        if device.type == "cpu" and is_profiling():
            log.info("Adacc: another profiler is active: the plan leaves out the optimizer's temporary memory")
            return
        if clips:
            self.nbytes = max(self.nbytes, measure_clipping(model.parameters()))
        meter = OptimizerMeter(device)
        meter.__enter__()
        self.meter = meter

    def end(self) -> None:
        """End the measurement after the optimizer's step. Do nothing if no measurement is running."""
        if self.meter is not None:
            with suppress(ProfilerConflictError):
                self.meter.__exit__(None, None, None)
            self.nbytes = max(self.nbytes, self.meter.nbytes)
        self.meter = None
