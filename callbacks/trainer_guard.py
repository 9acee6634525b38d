"""Knowing when a Trainer's run fails: Transformers calls no event then, and the callback must leave no trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

GUARDED = ("_run_epoch", "_evaluate")
"""Methods of the Trainer that run between on_train_begin and on_train_end."""


class TrainerGuard:
    """Calls a function when a run's epoch or evaluation raises; `remove()` takes it off the Trainer."""

    def __init__(self, trainer: Any, on_failure: Callable[[], None]) -> None:
        self._trainer = trainer
        self._on_failure = on_failure
        for name in GUARDED:
            setattr(trainer, name, self._guarded(getattr(trainer, name)))

    @classmethod
    def around_caller(cls, callback: TrainerCallback, on_failure: Callable[[], None]) -> TrainerGuard | None:
        """The guard of the Trainer that is calling `callback` now; None where something else calls it."""
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
                return cls(caller, on_failure)
            frame = frame.f_back
        return None

    def remove(self) -> None:
        for name in GUARDED:
            self._trainer.__dict__.pop(name, None)

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except BaseException:
                self._on_failure()
                raise

        return call
