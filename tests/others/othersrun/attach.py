"""Hooks that add AdaccCallback to every Trainer of other packages' code, and record the outcome of each training."""

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from memory_meter import MemoryMeter
from transformers import Trainer, TrainerCallback

from adacc_hf.callbacks import AdaccCallback

TIMES = ("_runtime", "_per_second", "step_time", "total_flos")
"""Endings of logged names that depend on the machine, or on Transformers' own counts, not on the training."""


class StepPeaks(TrainerCallback):
    """Peak of live bytes in each step, by a meter that is independent of adacc_hf."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._meter = MemoryMeter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.reset_peak()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peaks.append(self._meter.peak_bytes)


class Trainings:
    """Records of all trainings in this process, in order."""

    def __init__(self, callback_settings: dict[str, Any] | None) -> None:
        """If `callback_settings` are not None, add an AdaccCallback with these settings to each Trainer."""
        self.label = ""
        """Name of the current case, which is recorded with each training."""
        self.records: list[dict[str, Any]] = []
        self._settings = callback_settings

    def watch(self) -> None:
        """Start recording: patch Trainer's constructor and its method `train`."""
        Trainer.__init__ = self._around_init(Trainer.__init__)
        Trainer.train = self._around_train(Trainer.train)

    def _around_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            init(trainer, *args, **kwargs)
            if self._settings is not None:
                trainer.add_callback(AdaccCallback(**self._settings))

        return call

    def _around_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            steps = StepPeaks()
            trainer.add_callback(steps)
            record: dict[str, Any] = {"label": self.label, "error": None}
            self.records.append(record)
            try:
                return train(trainer, *args, **kwargs)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}"
                raise
            finally:
                trainer.remove_callback(steps)
                record |= outcome(trainer)
                record["step_peaks"] = steps.peaks

        return call


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return the results that must be equal with and without the callback, and the callback's counts of actions."""
    own_callbacks = [one for one in trainer.callback_handler.callbacks if isinstance(one, AdaccCallback)]
    policy = own_callbacks[0].policy if own_callbacks else None
    return {
        "logs": [repr(sorted(of_training(record).items())) for record in trainer.state.log_history],
        "num_steps": trainer.state.global_step,
        "weights": digest(trainer.model),
        "actions": None if policy is None else policy.action_counts(),
    }


def of_training(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of the log without times and without the callback's entries."""
    return {name: value for name, value in record.items() if not name.startswith("adacc/") and not name.endswith(TIMES)}


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all bits of the weights and buffers."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha256.update(name.encode())
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            sha256.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
