"""The batch that a profile is made of: what a model was trained on last, and who made the loss of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from transformers import Trainer

from adacc_hf.profiling.own_loss import ComputeLoss


class LastBatch:
    """Keeps the last batch that `model` was trained on, until `remove()`.

    Where the loss is not the model's own, because the Trainer makes one (label smoothing, preferences, a `compute_loss`
    of the user's), or takes several calls of the model, the batch is what the Trainer's `compute_loss` was given, and
    `compute_loss` is set.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch: dict[str, Any] | None = None
        self.compute_loss: ComputeLoss | None = None
        self._given: tuple[dict[str, Any], ComputeLoss] | None = None
        self._own: Node | None = None
        """What the model's own loss was made by, until the Trainer has returned its loss."""
        self._num_calls = 0
        """Of the model, since the last batch was given."""
        self._hook = model.register_forward_hook(self._keep, with_kwargs=True)

    def remove(self) -> None:
        """Keep nothing more, and let go of the batch. Harmless when called again."""
        self._hook.remove()
        self.batch = self.compute_loss = self._given = self._own = None

    def given(self, trainer: Trainer, compute: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> None:
        """`compute`, the `compute_loss` of `trainer`, is about to be called with these arguments after the model."""

        def compute_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            return loss_of(trainer, compute, model, batch, *args, **kwargs)

        if isinstance(inputs, Mapping):
            self._given = (dict(inputs), compute_loss)  # a copy: the Trainer takes the labels out
            self._num_calls = 0

    def loss_is_made(self, result: Any) -> None:
        """`compute_loss` has returned `result`, made of other outputs unless it is a multiple of the model's loss."""
        loss = result[0] if isinstance(result, tuple) else result
        if self._own is not None and not _leads_to(loss.grad_fn, self._own):
            self.batch, self.compute_loss = self._given
        self._own = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._num_calls += 1
        loss = getattr(output, "loss", None)
        is_whole = self._num_calls == 1 and kwargs and loss is not None
        self._own = loss.grad_fn if self._given is not None and is_whole else None
        if self._given is not None and not is_whole:
            self.batch, self.compute_loss = self._given
        elif kwargs:
            self.batch, self.compute_loss = dict(kwargs), None


def loss_of(trainer: Trainer, compute: Callable[..., Any], model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The loss alone that `compute`, the `compute_loss` of `trainer`, makes of a batch."""
    with trainer.compute_loss_context_manager():
        result = compute(model, batch, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def _leads_to(node: Node | None, wanted: Node) -> bool:
    """Whether one path alone leads from `node` down the graph, and to `wanted`: a loss that was scaled."""
    while node is not None and node is not wanted:
        following = [child for child, _ in node.next_functions if child is not None]
        node = following[0] if len(following) == 1 else None
    return node is wanted
