"""Training with Lightning's Trainer on the model, the data and the loss of a set-up's Trainer."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from own_loop import prepare_batch
from transformers import Trainer

from adacc_hf.integrations.lightning import AdaccLightningCallback


class SetupModule(LightningModule):
    """LightningModule of a set-up's model, loss and optimizer."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self._trainer_of_setup = trainer
        self.norm = 0.0
        """Gradient norm of the latest step, before clipping."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._trainer_of_setup.create_optimizer()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Any]:
        return prepare_batch(self._trainer_of_setup, batch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.compute_loss(self.model, batch)

    def compute_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with self._trainer_of_setup.compute_loss_context_manager():
            return self._trainer_of_setup.compute_loss(model, batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(gradients).item()


class StepReporter(Callback):
    """Callback that reports the loss and the gradient norm of each optimizer step."""

    def __init__(self, after_step: Callable[[float, float], None]) -> None:
        self._after_step = after_step
        self._num_steps = 0
        self._loss = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loss += outputs["loss"].item() / trainer.accumulate_grad_batches
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self._after_step(self._loss, pl_module.norm)
            self._loss = 0.0


def train_lightning(
    trainer: Trainer, steps: int, settings: dict[str, Any] | None, after_step: Callable[[float, float], None]
) -> AdaccLightningCallback | None:
    """Train for `steps` steps, with the Adacc callback if its settings are given, and call `after_step(loss, norm)`."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = SetupModule(trainer)
    adacc = None if settings is None else AdaccLightningCallback(**settings)
    fit = LightningTrainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=trainer.args.gradient_accumulation_steps,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([] if adacc is None else [adacc]), StepReporter(after_step)],
    )
    module.train()
    fit.fit(module, trainer.get_train_dataloader())
    return adacc
