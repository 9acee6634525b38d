"""TrainerLoop: tells an AdaccSession the properties of a Trainer's training loop.

tests/callbacks/test_trainer_loop.py checks that all names of the Trainer used here exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments

from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.price.training_step import NoSync
from adacc_hf.torch_glue.model_state import ModelState

NO_BATCH = (
    "AdaccCallback saw no training batch: the model has to be called by keyword arguments, in train mode, with "
    "gradients on, and its loss has to be made by the model itself or by the Trainer's compute_loss (TRL's "
    "OnlineDPOTrainer makes the loss in training_step). Train without AdaccCallback, or in a loop of your own with "
    "AdaccSession(..., compute_loss=...)"
)


class TrainerLoop(TrainingLoop):
    """Properties of the training loop of a Trainer.

    If `trainer` is None, the properties come from the TrainingArguments.
    """

    no_batch = NO_BATCH

    def __init__(self, args: TrainingArguments, state: TrainerState, trainer: Trainer | None) -> None:
        self._args, self._is_first_rank, self._trainer = args, state.is_world_process_zero, trainer
        super().__init__(folder=run_folder(args, trainer))

    @property
    def num_micro(self) -> int:
        """Micro-batches per step. A callback may change the setting during the run."""
        return self._args.gradient_accumulation_steps

    @num_micro.setter
    def num_micro(self, _: int) -> None:
        """Ignore a count: the setting is known."""

    @property
    def precision(self) -> str:
        return "no" if self._trainer is None else str(self._trainer.accelerator.mixed_precision)

    @property
    def clips(self) -> bool:
        return bool(self._args.max_grad_norm)

    @property
    def is_first_rank(self) -> bool:
        return self._is_first_rank

    def profiling(self) -> AbstractContextManager[Any]:
        return keep_figures(self._trainer)

    def num_prefetched(self, device: torch.device) -> int:
        # Accelerate's loader reads one batch ahead, and moves a batch to a GPU only when its turn has come.
        return int(device.type == "cpu" and self._trainer is not None)

    def num_before_step(self, device: torch.device) -> int:
        return self.num_micro + self.num_prefetched(device) if device.type == "cpu" else 0

    def no_sync(self, model: nn.Module) -> NoSync | None:
        """Return a function that creates the context of every micro-batch of a step except the last.

        In this context, ranks do not exchange gradients. Return None if ranks exchange gradients in every micro-batch.
        """
        if self._trainer is None:
            return None
        accelerator = self._trainer.accelerator
        syncs_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if syncs_each or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return None
        return partial(accelerator.no_sync, model=model)


@contextmanager
def keep_figures(trainer: Trainer | None) -> Iterator[None]:
    """Restore the attributes of `trainer`, such as collected metrics, after the model was profiled in the `with` block.

    Logs inside the block are dropped. A profile calls `compute_loss` more often than training does. Some Trainers, such
    as TRL's DPOTrainer, collect metrics in `compute_loss`, and users log metrics there. Metrics must come from training
    alone. The Trainer's models are not restored here, because the profiler restores models.
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
    """Do nothing. Replaces `Trainer.log` while the model is profiled."""


def batch_loss(
    trainer: Trainer | None,
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
    batch: dict[str, Any],
) -> torch.Tensor:
    """Return the loss of `batch`, for a profile. `compute` is the method `compute_loss` of `trainer`."""
    assert trainer is not None  # because `compute` is its method
    with trainer.compute_loss_context_manager():
        result = compute(model, batch, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def run_folder(args: TrainingArguments, trainer: Trainer | None) -> str:
    """Return the folder in which the Trainer saves. In a hyperparameter search, each trial has its own."""
    assert args.output_dir is not None  # it has a default name
    trial = getattr(trainer, "_trial", None)
    return args.output_dir if trainer is None or trial is None else trainer._get_output_dir(trial)


def parallelism_of(trainer: Trainer) -> Any:
    """Return the ParallelismConfig of the Trainer's Accelerator, or None if parallelism is not configured."""
    return getattr(trainer.accelerator, "parallelism_config", None)


def compiler_of(trainer: Trainer) -> str | None:
    """Return the torch.compile backend of the Trainer's Accelerator in lower case, or None without torch.compile."""
    plugin = trainer.accelerator.state.dynamo_plugin
    backend = "no" if plugin is None else plugin.backend.value.lower()
    return None if backend == "no" else backend
