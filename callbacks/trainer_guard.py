"""What callbacks need of the Trainer that runs them and no event gives.

Transformers calls no event when a run fails, and a callback must leave no trace then: so what runs between
on_train_begin and on_train_end is wrapped. And what `on_log` adds to a log reaches only the callbacks further down the
list, which TensorBoard and the other reporters are not: so guarded callbacks go to the front while the run lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback

GUARDED_METHODS = ("_run_epoch", "_evaluate", "_finalize_training")
"""Methods of the Trainer that run between on_train_begin and on_train_end."""

_ATTRIBUTE = "_adacc_guard"
_ABSENT = object()


class TrainerGuard:
    """One run of a Trainer, on behalf of one or more callbacks. It is gone when the last of them has left."""

    def __init__(self, trainer: Trainer, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint
        """The folder that the run resumes from."""
        self.trainer = trainer
        self._handler = trainer.callback_handler
        self._before: list[TrainerCallback] = self._handler.callbacks
        self._on_failure: dict[TrainerCallback, Callable[[], None]] = {}
        self._undo: list[tuple[Any, str, Any]] = []

    @classmethod
    def around_caller(cls, callback: TrainerCallback, on_failure: Callable[[], None]) -> TrainerGuard | None:
        """The guard of the Trainer that is calling `callback.on_train_begin`; None where something else calls it.

        `on_failure` is called when the run raises; it must `leave` the guard.
        """
        found = calling_trainer(callback)
        if found is None:
            return None
        trainer, checkpoint = found
        guard = trainer.__dict__.get(_ATTRIBUTE)
        if guard is None:
            guard = cls(trainer, checkpoint)
            guard._install(callback)
        guard._admit(callback, on_failure)
        return guard

    def leave(self, callback: TrainerCallback) -> None:
        """`callback` needs no guard any more. Harmless when called again."""
        if self._on_failure.pop(callback, None) is None or self._on_failure:
            return
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._restore_order()

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Until the guard is gone, the Trainer's method `name` is `around(method, *args, **kwargs)`."""
        method = getattr(self.trainer, name)
        self._set(self.trainer, name, partial(around, method))

    def _install(self, callback: TrainerCallback) -> None:
        self._set(self.trainer, _ATTRIBUTE, self)
        for name in GUARDED_METHODS:
            self._guard(self.trainer, name)
        self._guard(self._handler, "on_epoch_begin")
        for later in self._before[self._before.index(callback) + 1 :]:
            self._guard(later, "on_train_begin")

    def _admit(self, callback: TrainerCallback, on_failure: Callable[[], None]) -> None:
        self._on_failure[callback] = on_failure
        others = [other for other in self._handler.callbacks if other not in self._on_failure]
        # A new list: the handler is iterating over the present one, and moving items in it would skip some.
        self._handler.callbacks = [*self._on_failure, *others]

    def _restore_order(self) -> None:
        """Give the handler its own list again, less what was removed from it during the run and with what was added."""
        now = self._handler.callbacks
        kept = [callback for callback in self._before if callback in now]
        self._before[:] = kept + [callback for callback in now if callback not in kept]
        self._handler.callbacks = self._before

    def _guard(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except BaseException:
                for on_failure in list(self._on_failure.values()):
                    on_failure()
                raise

        self._set(owner, name, call)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        owner.__dict__[name] = value


def calling_trainer(callback: TrainerCallback) -> tuple[Trainer, str | None] | None:
    """The Trainer whose training loop is on the stack, and the checkpoint that it resumes from."""
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        caller = names.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            # No event and no attribute of the Trainer tells where a run resumes from, only its loop's argument does.
            return caller, names.get("resume_from_checkpoint")
        frame = frame.f_back
    return None
