"""Adding metrics to the Trainer's log of a training step."""

from __future__ import annotations

from transformers import TrainerState

TRAINING_KEYS = frozenset({"loss", "train_loss"})
"""Keys that the Trainer's logs of training steps and of the whole run have, and those of evaluation have not."""


def is_training_log(logs: dict[str, float] | None) -> bool:
    return logs is not None and not TRAINING_KEYS.isdisjoint(logs)


def add_to_log(logs: dict[str, float], state: TrainerState, metrics: dict[str, float]) -> None:
    """Add `metrics` to `logs`, which later callbacks see, and to the copy of it in the Trainer's history."""
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)
