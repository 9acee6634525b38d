"""Watches the model and the optimizer of a loop of the user's own: whoever writes it sends no events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from adacc_hf.adapt.micro_batches import by_name
from adacc_hf.adapt.run import Run
from adacc_hf.price.whole_model import ComputeLoss


class LoopWatch:
    """Tells a run when its model is called on a micro-batch, and when its optimizer steps."""

    def __init__(self, run: Run, compute_loss: ComputeLoss | None) -> None:
        self.is_on = False
        """Whether a micro-batch runs."""
        self._run, self._compute_loss = run, compute_loss
        self._batch: Any = None
        self._is_busy = False
        """Whether it is told right now: a profile calls the model itself."""
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Watch from now on."""
        self._hooks = [
            self._run.model.register_forward_pre_hook(self._forward_begins, with_kwargs=True),
            self._run.optimizer.register_step_pre_hook(self._optimizer_begins),
            self._run.optimizer.register_step_post_hook(self._optimizer_ends),
        ]

    def check(self, batch: Any) -> None:
        """Raise TypeError if `compute_loss` could not be given `batch`."""
        if self._compute_loss is not None and not isinstance(batch, Mapping):
            raise TypeError(
                f"a batch of type {type(batch).__name__} beside compute_loss: give session.step or session.micro_batch "
                f"the mapping that compute_loss(model, batch) takes, for a profile makes parts of it"
            )

    def begin_micro_batch(self, batch: Any) -> None:
        """Training on `batch` begins."""
        self.check(batch)
        self.is_on, self._batch = True, batch

    def remove(self) -> None:
        """Watch no more. Harmless when called again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._batch, self.is_on = [], None, False

    @contextmanager
    def _telling(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_on or self._is_busy or not module.training or not torch.is_grad_enabled():
            return
        inputs = self._batch if self._compute_loss is not None else by_name(module, args, kwargs)
        if inputs is None:
            return
        self._run.loop.note_autocast(next(module.parameters()).device.type)
        with self._telling():
            self._run.phase.forward_begins(inputs, self._compute_loss, is_certain=self._compute_loss is not None)

    def _optimizer_begins(self, *_: Any) -> None:
        self._run.has_stepped = True
        self._run.phase.optimizer_begins()

    def _optimizer_ends(self, *_: Any) -> None:
        self._run.phase.optimizer_ends()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel. Raises ValueError for nn.DataParallel."""
    if isinstance(model, DataParallel):
        raise ValueError(
            "nn.DataParallel calls one block from several threads, which AdaccSession does not support: use "
            "DistributedDataParallel (torchrun, accelerate launch), or one device"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def unwrapped_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Accelerate's, whose hooks are called. Raises TypeError for none of torch's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrapped_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is no torch.optim.Optimizer: give the one that the loop steps, whose state and "
            f"step are in the plan, and whose step tells that a training step is over"
        )
    return optimizer
