"""A training loop of a user's own, with Accelerate, on the model, the data and the loss of a set-up's Trainer."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer

from adacc_hf import AdaccSession


def batches_of(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Yield batches on the model's device, epoch after epoch."""
    loader = trainer.get_train_dataloader()
    while True:
        for batch in loader:
            yield prepare_batch(trainer, batch)


def prepare_batch(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Return the arguments of `trainer.compute_loss` for an item of the trainer's loader. A GRPOTrainer's items are
    prompts. It generates completions for them at every few calls, which `_step` counts. The two attributes are those
    that its own loop sets."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    prepared = dict(trainer._prepare_inputs(batch))
    trainer._step = getattr(trainer, "_step", 0) + 1
    return prepared


def train_own_loop(
    trainer: Trainer, steps: int, session_settings: dict[str, Any] | None, after_step: Callable[[float, float], None]
) -> AdaccSession | None:
    """Train for `steps` steps, within an AdaccSession if its settings are given, and call `after_step(loss, norm)`."""
    model, accelerator = trainer.model, trainer.accelerator
    optimizer = accelerator.prepare(trainer.create_optimizer())
    num_micro = trainer.args.gradient_accumulation_steps
    model.train()

    def compute_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, batch)

    session = None
    if session_settings is not None:
        session = AdaccSession(model, optimizer, **session_settings)
    data = batches_of(trainer)
    for _ in range(steps):
        total = 0.0
        with nullcontext() if session is None else session.step():
            for micro in range(num_micro):
                batch = next(data)
                with nullcontext() if session is None else session.micro_batch(batch):
                    loss = compute_loss(model, batch) / num_micro
                    accelerator.backward(loss)
                    total += loss.item()
                    del loss
                    if micro == num_micro - 1:
                        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
        after_step(total, norm.item())
    if session is not None:
        session.close()
    return session
