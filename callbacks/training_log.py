"""Functions for the logs of a Trainer's training steps: add a callback's metrics, and recognize the Trainer's own logs.

tests/callbacks/test_trainer_loop.py checks that all names of the Trainer used here exist.
"""

from __future__ import annotations

from typing import TypeGuard

from transformers import Trainer, TrainerState

LAST_LOGGED = "_globalstep_last_logged"
"""Attribute that the Trainer sets to the current step right before a log. The attribute does not exist before the first
run."""
TRAINING_KEYS = frozenset({"loss", "train_loss"})
"""Keys of the Trainer's logs of training steps and of the whole run. Logs of evaluation lack these keys."""


def is_training_log(logs: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
    """Return True if `logs` are the metrics of training steps or of the whole run, and not of an evaluation."""
    return logs is not None and not TRAINING_KEYS.isdisjoint(logs)


def add_to_log(logs: dict[str, float], state: TrainerState, metrics: dict[str, float]) -> None:
    """Add `metrics` to `logs`, which the Trainer passes to later callbacks, and to the copy of `logs` in
    `state.log_history`."""
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)


class OwnLogs:
    """Detector of the Trainer's own logs of training steps, which are made on all ranks. User code may call
    `trainer.log` on one rank alone. If metrics were then gathered from all ranks, this rank would hang."""

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._last_step = self._logged_step()

    def has_another(self) -> bool:
        """Return True if the Trainer itself made the current log, and not a call of `trainer.log` in user code. If the
        Trainer is unknown, the source of a log is unknown too, and all logs count as the Trainer's. Call this method
        once for each log."""
        before, self._last_step = self._last_step, self._logged_step()
        return self._trainer is None or self._last_step != before

    def _logged_step(self) -> int | None:
        # No event has the source of a log, but the Trainer sets this attribute right before it logs.
        return None if self._trainer is None else getattr(self._trainer, LAST_LOGGED)
