"""The Trainer's logs of training steps: which are its own, and adding metrics to them."""

from __future__ import annotations

from transformers import Trainer, TrainerState

TRAINING_KEYS = frozenset({"loss", "train_loss"})
"""Keys that the Trainer's logs of training steps and of the whole run have, and those of evaluation have not."""


def is_training_log(logs: dict[str, float] | None) -> bool:
    return logs is not None and not TRAINING_KEYS.isdisjoint(logs)


def add_to_log(logs: dict[str, float], state: TrainerState, metrics: dict[str, float]) -> None:
    """Add `metrics` to `logs`, which later callbacks see, and to the copy of it in the Trainer's history."""
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)


class OwnLogs:
    """Tells the logs that the Trainer makes of training steps, on all ranks, from those of its user.

    A user may log a loss on one rank alone, where whoever asks the other ranks about it waits for ever.
    """

    def __init__(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        self._last_step = self._step_logged()

    def has_another(self) -> bool:
        """Whether the log that is being made is one; to be asked once for each log. True where there is no Trainer."""
        before, self._last_step = self._last_step, self._step_logged()
        return self._trainer is None or self._last_step != before

    def _step_logged(self) -> int | None:
        # No event tells who logs, but the Trainer notes the step right before it does.
        return None if self._trainer is None else self._trainer._globalstep_last_logged
