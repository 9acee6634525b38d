"""TrainerGuard: wraps methods of a running Trainer for callbacks, and restores the methods even if the run fails.

Transformers sends no event when a run fails. Therefore the methods that the Trainer calls between the events
on_train_begin and on_train_end are wrapped.

Tested with Transformers 5.17 and 5.23, and Accelerate 1.15. tests/callbacks/test_trainer_loop.py checks that all names
of the Trainer used here exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

GUARDED_METHODS = ("_run_epoch", "_evaluate", "_finalize_training")
"""Methods that the Trainer calls between the events on_train_begin and on_train_end."""
RESUMED_FROM = "resume_from_checkpoint"
"""Name of the local variable with the checkpoint folder in the stack frame of the Trainer's training loop."""

_ATTRIBUTE = "_adacc_guard"
_ABSENT = object()


class TrainerGuard:
    """Temporary wrappers around the methods of a Trainer, for one run. Several callbacks may share a guard. When
    `leave` has been called for each callback, the original methods are restored. To create a guard, call
    `around_caller`."""

    def __init__(self, trainer: Trainer, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint
        """Folder from which the run resumes, or None for a new run."""
        self.trainer = trainer
        self._handler = trainer.callback_handler
        self._on_failure: dict[TrainerCallback, Callable[[], None]] = {}
        self._undo: list[tuple[Any, str, Any, Any]] = []
        """(owner, name, value before, wrapper) of each replaced attribute."""

    @classmethod
    def around_caller(cls, callback: TrainerCallback, on_failure: Callable[[], None]) -> TrainerGuard:
        """Return the guard of the Trainer whose `train` is calling `callback`. Call this method in `on_train_begin`.
        The Trainer is found on the call stack. If the Trainer has no guard yet, a guard is installed. If the run
        raises, the guard calls `on_failure`, which must call `leave`."""
        trainer, checkpoint = calling_trainer(callback)
        guard = trainer.__dict__.get(_ATTRIBUTE)
        if guard is None:
            guard = cls(trainer, checkpoint)
            guard._install(callback)
        guard._on_failure[callback] = on_failure
        return guard

    def leave(self, callback: TrainerCallback) -> None:
        """Remove `callback`. Restore the Trainer's methods after the last one. Further calls have no effect."""
        if self._on_failure.pop(callback, None) is None or self._on_failure:
            return
        while self._undo:
            owner, name, before, wrapper = self._undo.pop()
            if owner.__dict__.get(name, _ABSENT) is not wrapper:
                continue  # the user has replaced it since
            if before is _ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Replace the Trainer's method `name` by `around(method, *args, **kwargs)` until all callbacks have left."""
        method = getattr(self.trainer, name)
        self._set(self.trainer, name, partial(around, method))

    def _install(self, callback: TrainerCallback) -> None:
        self._set(self.trainer, _ATTRIBUTE, self)
        for name in GUARDED_METHODS:
            self._guard(self.trainer, name)
        for name in ("on_epoch_begin", "remove_callback", "pop_callback"):
            self._guard(self._handler, name)
        callbacks = callbacks_of(self.trainer)
        for later in callbacks[callbacks.index(callback) + 1 :]:
            self._guard(later, "on_train_begin")

    def _guard(self, owner: Any, name: str) -> None:
        """Wrap the method `name` of `owner`. If it raises, `on_failure` of every callback is called, and else that of
        each callback that was removed from the Trainer during the run."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            has_failed = True
            try:
                result = method(*args, **kwargs)
                has_failed = False
                return result
            finally:
                for callback, on_failure in list(self._on_failure.items()):
                    if has_failed or callback not in self._handler.callbacks:
                        on_failure()

        self._set(owner, name, call)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name, _ABSENT), value))
        owner.__dict__[name] = value


def calling_trainer(callback: TrainerCallback) -> tuple[Trainer, str | None]:
    """Find the Trainer run that is calling `callback` on the call stack. Return (trainer, checkpoint folder). The
    folder is None for a new run. Raises RuntimeError if no Trainer with this callback is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        caller = names.get("self")
        if isinstance(caller, Trainer) and callback in callbacks_of(caller):
            # Events and attributes of the Trainer lack the checkpoint folder. Only its loop's argument has it.
            return caller, names.get(RESUMED_FROM)
        frame = frame.f_back
    raise RuntimeError(
        f"a training loop calls {type(callback).__name__} without a Trainer, whose methods the callback needs: use "
        f"AdaccSession in this loop, and train without `adacc run`"
    )


def callbacks_of(trainer: Trainer) -> list[TrainerCallback]:
    """Return the callbacks of `trainer`, in the order in which their events are called."""
    return trainer.callback_handler.callbacks
