"""The one door to the Trainer: what callbacks need of it and no event gives, and its own logs, figures and batches.

Transformers calls no event when a run fails, and a callback must leave no trace then: so what runs between
on_train_begin and on_train_end is wrapped. And what `on_log` adds to a log reaches only the callbacks further down the
list, which TensorBoard and the other reporters are not: so guarded callbacks go to the front while the run lasts.

Tested with Transformers 5.17 and 5.23, and Accelerate 1.15. tests/callbacks/test_trainer_door.py looks for each of the
names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.memory_profile import NoSync
from adacc_hf.torch_glue.model_state import ModelState

GUARDED_METHODS = ("_run_epoch", "_evaluate", "_finalize_training")
"""Methods of the Trainer that run between on_train_begin and on_train_end."""
LAST_LOGGED = "_globalstep_last_logged"
"""The attribute in which the Trainer notes the step, right before it logs one; there is none before its first run."""
RESUMED_FROM = "resume_from_checkpoint"
"""The argument of the Trainer's loop, that its frames have by this name."""

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


class Unguarded:
    """Stands for the guard where something else than a Trainer calls a callback, or nothing does."""

    trainer = None

    def __init__(self, args: TrainingArguments | None) -> None:
        self._args = args

    @property
    def checkpoint(self) -> str | None:
        """The folder that the run is said to resume from."""
        return None if self._args is None else self._args.resume_from_checkpoint

    def wrap(self, name: str, around: Callable[..., Any]) -> None:
        """There is no Trainer whose method could be wrapped."""

    def leave(self, callback: TrainerCallback) -> None:
        """There is no guard to leave."""


def calling_trainer(callback: TrainerCallback) -> tuple[Trainer, str | None] | None:
    """The Trainer whose training loop is on the stack, and the checkpoint that it resumes from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        caller = names.get("self")
        if isinstance(caller, Trainer) and callback in callbacks_of(caller):
            # No event and no attribute of the Trainer tells where a run resumes from, only its loop's argument does.
            return caller, names.get(RESUMED_FROM)
        frame = frame.f_back
    return None


def callbacks_of(trainer: Trainer) -> list[TrainerCallback]:
    """The callbacks of `trainer`, in the order in which it calls them."""
    return trainer.callback_handler.callbacks


# What the Trainer was told about devices and ranks, which it hands on to Accelerate.


def parallelism_of(trainer: Trainer) -> Any:
    """The ParallelismConfig, or None."""
    return getattr(trainer.accelerator, "parallelism_config", None)


def compiler_of(trainer: Trainer) -> str | None:
    """The backend of torch.compile that Accelerate was told to compile with, in lower case; None for none."""
    plugin = trainer.accelerator.state.dynamo_plugin
    backend = "no" if plugin is None else plugin.backend.value.lower()
    return None if backend == "no" else backend


# The Trainer's logs of training steps: which are its own, and adding metrics to them.

TRAINING_KEYS = frozenset({"loss", "train_loss"})
"""Keys that the Trainer's logs of training steps and of the whole run have, and those of evaluation have not."""


def is_training_log(logs: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
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
        return None if self._trainer is None else getattr(self._trainer, LAST_LOGGED)


# What a Trainer counts while it computes losses: figures that it logs later.
#
# A profile calls `compute_loss` some times more than training does. Trainers of preferences and rewards gather their
# metrics there, and users log theirs, which must be those of training alone.


@contextmanager
def keep_figures(trainer: Trainer | None) -> Iterator[None]:
    """While open the attributes of `trainer` may change; then they are as before, and so is what they hold.

    Until then nothing is logged either. Its models are left alone: a profile sees to them.
    """
    if trainer is None:
        yield
        return
    models = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
    before = ModelState([vars(trainer), type(trainer)], excluded=models)
    vars(trainer)["log"] = _log_nothing
    try:
        yield
    finally:
        before.restore()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `Trainer.log`."""


# What a session asks of the loop that it serves.

NO_BATCH = (
    "AdaccCallback saw no training batch: the model was not called in train mode with gradients on, or not by keyword "
    "arguments, or its loss is made neither by itself nor by the Trainer's compute_loss (TRL's OnlineDPOTrainer makes "
    "it in training_step): train without AdaccCallback, or in a loop of your own with "
    "AdaccSession(..., compute_loss=...)"
)


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the checkpoint of the present step."""
    assert args.output_dir is not None  # it has a name by default
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class TrainerLoop(TrainingLoop):
    """The training loop of a Trainer; without one, what its arguments say."""

    no_batch = NO_BATCH

    def __init__(self, args: TrainingArguments, state: TrainerState, trainer: Trainer | None) -> None:
        super().__init__(args.gradient_accumulation_steps, args.output_dir)
        self._args, self._is_first_rank, self._trainer = args, state.is_world_process_zero, trainer

    @property
    def clips(self) -> bool:
        return bool(self._args.max_grad_norm)

    @property
    def is_first_rank(self) -> bool:
        return self._is_first_rank

    def profiling(self) -> AbstractContextManager[Any]:
        return keep_figures(self._trainer)

    def num_prefetched(self, device: torch.device) -> int:
        # Accelerate's loader reads one batch ahead, and moves each to a GPU only when its turn has come.
        return int(device.type == "cpu" and self._trainer is not None)

    def num_before_step(self, device: torch.device) -> int:
        return self.num_micro + self.num_prefetched(device) if device.type == "cpu" else 0

    def no_sync(self, model: nn.Module) -> NoSync | None:
        """What the Trainer runs the micro-batches before a step's last one in; None where each exchanges gradients."""
        if self._trainer is None:
            return None
        accelerator = self._trainer.accelerator
        syncs_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if syncs_each or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return None
        return partial(accelerator.no_sync, model=model)


def loss_by(trainer: Trainer | None, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> ComputeLoss:
    """A function that makes the loss of a batch as `compute`, the `compute_loss` of `trainer`, would."""

    def compute_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        assert trainer is not None  # whose `compute_loss` this is
        with trainer.compute_loss_context_manager():
            result = compute(model, batch, *args, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    return compute_loss
