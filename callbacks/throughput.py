"""ThroughputCallback: tokens per second and peak memory of a run, added to the Trainer's log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.callbacks.trainer_guard import TrainerGuard
from adacc_hf.callbacks.trainer_loop import is_training_log
from adacc_hf.torch_glue.meters import take_peak


class ThroughputCallback(TrainerCallback):
    """Callback that logs the speed and the peak memory of the steps after the warm-up.

    | key | unit |
    |---|---|
    | `throughput/tokens_per_second` | tokens of all micro-batches on this process, per second |
    | `throughput/step_ms` | milliseconds, mean since the last log |
    | `throughput/peak_allocated_bytes` | bytes, CUDA only, maximum since the last log |

    For example:

        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[ThroughputCallback()])
    """

    def __init__(self, warmup_steps: int = 3) -> None:
        self.warmup_steps = warmup_steps
        """Number of steps at the start that are not measured, because caches are filled, kernels are tuned and batches
        are profiled in them."""
        self._hook: Any = None
        self._guard: TrainerGuard | None = None
        self._reset()

    def _reset(self) -> None:
        self._num_steps = self._timed_steps = self._tokens = self._tokens_in_step = 0
        self._seconds = 0.0
        self._started = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.detach()
        self._reset()
        self._guard = TrainerGuard.around_caller(self, on_failure=self.detach)
        self._guard.wrap("log", self._log)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._tokens_in_step = 0
        self._started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps >= self.warmup_steps and torch.cuda.is_available():
            torch.cuda.synchronize()  # after the last warm-up step too, else the next step would include its kernels
        if self._num_steps > self.warmup_steps:
            self._seconds += time.perf_counter() - self._started
            self._tokens += self._tokens_in_step
            self._timed_steps += 1

    def _log(self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._timed_steps and is_training_log(logs):
            logs["throughput/tokens_per_second"] = self._tokens / self._seconds
            logs["throughput/step_ms"] = self._seconds / self._timed_steps * 1e3
            if torch.cuda.is_available():
                logs["throughput/peak_allocated_bytes"] = take_peak()
            self._tokens = self._timed_steps = 0
            self._seconds = 0.0
        log(logs, *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove all hooks and wrappers from the model and the Trainer. Further calls have no effect."""
        if self._hook is not None:
            self._hook.remove()
        if self._guard is not None:
            self._guard.leave(self)
        self._hook = self._guard = None

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if module.training and torch.is_grad_enabled() and ids is not None:
            self._tokens_in_step += ids.numel()

    def __repr__(self) -> str:
        return f"ThroughputCallback(warmup_steps={self.warmup_steps})"
