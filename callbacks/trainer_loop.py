"""TrainerLoop: tells an AdaccSession the properties of a Trainer's training loop. Functions for the Trainer's logs.

tests/callbacks/test_trainer_loop.py checks that all names of the Trainer used here exist.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer

from adacc_hf.adapt.run_profiler import TrainingLoop


class TrainerLoop(TrainingLoop):
    """Properties of a Trainer's training loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().__init__(trainer.args.gradient_accumulation_steps, run_folder(trainer))

    def num_prefetched(self, device: torch.device) -> int:
        # Accelerate's loader reads one batch ahead, and moves a batch to a GPU only when its turn has come.
        return int(device.type == "cpu")

    def num_before_step(self, device: torch.device) -> int:
        return self.num_micro + self.num_prefetched(device) if device.type == "cpu" else 0

    @property
    def postpones_exchange(self) -> bool:
        accelerator = self._trainer.accelerator
        syncs_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return not syncs_each and accelerator.distributed_type != DistributedType.DEEPSPEED


def run_folder(trainer: Trainer) -> str:
    """Return the folder in which the Trainer saves. In a hyperparameter search, each trial has its own."""
    assert trainer.args.output_dir is not None  # it has a default name
    trial = getattr(trainer, "_trial", None)
    return trainer.args.output_dir if trial is None else trainer._get_output_dir(trial)


def parallelism_of(trainer: Trainer) -> Any:
    """Return the ParallelismConfig of the Trainer's Accelerator, or None if parallelism is not configured."""
    return getattr(trainer.accelerator, "parallelism_config", None)


def compiler_of(trainer: Trainer) -> str | None:
    """Return the torch.compile backend of the Trainer's Accelerator in lower case, or None without torch.compile."""
    plugin = trainer.accelerator.state.dynamo_plugin
    backend = "no" if plugin is None else plugin.backend.value.lower()
    return None if backend == "no" else backend


TRAINING_KEYS = frozenset({"loss", "train_loss"})
"""Keys of the Trainer's logs of training steps and of the whole run. Logs of evaluation lack these keys."""


def is_training_log(logs: dict[str, float]) -> bool:
    """Return True if `logs` are the metrics of training steps or of the whole run, and not of an evaluation."""
    return not TRAINING_KEYS.isdisjoint(logs)
