"""Puts AdaccCallback into every Trainer that others' code makes, and notes how each training went."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from memory_meter import MemoryMeter
from transformers import Trainer, TrainerCallback

from adacc_hf.callbacks import AdaccCallback

TIMES = ("_runtime", "_per_second", "step_time", "total_flos")
"""Endings of what is logged of the machine, and of what Transformers counts in its own ways, not of the training."""


class StepPeaks(TrainerCallback):
    """The most bytes live in each step, by a meter that is no part of what is tested."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._meter = MemoryMeter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.reset_peak()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peaks.append(self._meter.peak_bytes)


class Trainings:
    """What became of all trainings of this process, in order."""

    def __init__(self, callback_settings: dict[str, Any] | None) -> None:
        """With settings, each Trainer gets an AdaccCallback of these."""
        self.label = ""
        """Whatever runs now: it is noted with each training."""
        self.found: list[dict[str, Any]] = []
        self._settings = callback_settings

    def watch(self) -> None:
        """From now on."""
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
            self.found.append(record)
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
    """What a training left: all that must be the same with and without the callback, and what the callback did."""
    own = [one for one in trainer.callback_handler.callbacks if isinstance(one, AdaccCallback)]
    return {
        "logs": [repr(sorted(of_training(record).items())) for record in trainer.state.log_history],
        "num_steps": trainer.state.global_step,
        "weights": digest(trainer.model),
        "actions": own[0].policy.action_counts() if own and own[0].policy is not None else None,
    }


def of_training(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the log without times and without what the callback adds to it."""
    return {name: value for name, value in record.items() if not name.startswith("adacc/") and not name.endswith(TIMES)}


def digest(model: torch.nn.Module) -> str:
    """A hash of all weights and buffers, to the last bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            found.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
