"""What a run trains on: the sizes of each micro-batch, and the batch that a profile is made of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from adacc_hf.price.whole_model import ComputeLoss
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes


class MicroBatches:
    """What a run trains on: the sizes of each micro-batch, and, while a profile waits for it, the last one itself."""

    def __init__(self) -> None:
        self.shapes: BatchShapes = ()
        self.has_met = False
        """Whether `shapes` are those of the micro-batch that runs, or ran last."""
        self._sizes: list[tuple[str, torch.Size]] = []
        self._last: LastBatch | None = None

    @property
    def is_catching(self) -> bool:
        """Whether the last one is kept."""
        return self._last is not None

    @property
    def met(self) -> BatchShapes | None:
        """The sizes of the one that runs, or ran last; None where it has no tensors yet."""
        return self.shapes if self.has_met else None

    def begin(self) -> None:
        """The next one begins."""
        self.has_met = False
        self.begin_again()

    def begin_again(self) -> None:
        """The present one begins, for the first time or once more."""
        if self._last is not None:
            self._last.begin()

    def meet(self, inputs: Any) -> bool:
        """Whether `inputs` have the micro-batch's tensors, which were not met before: reinforcement learning makes them
        of samples within the step."""
        if self.has_met or not isinstance(inputs, Mapping):
            return False
        sizes = [(name, given.shape) for name, given in inputs.items() if isinstance(given, torch.Tensor)]
        if sizes != self._sizes:  # most have the sizes of the one before
            self._sizes, self.shapes = sizes, batch_shapes(inputs)
        self.has_met = True
        return True

    def catch(self, model: nn.Module) -> None:
        """Keep the last one from now on. Harmless when it is kept already."""
        if self._last is None:
            self._last = LastBatch(model)

    def given(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """`compute_loss` is about to make the loss of `inputs`: a profile may need both."""
        if self._last is not None:
            self._last.given(inputs, compute_loss, is_certain)

    def loss_is_made(self, result: Any) -> None:
        """The loop has made its loss, which is `result`, or its first item."""
        if self._last is not None:
            self._last.loss_is_made(result)

    def take(self) -> tuple[dict[str, Any] | None, ComputeLoss | None]:
        """The last one that was kept and what makes its loss, which are let go of; no more are kept."""
        assert self._last is not None
        caught = self._last.batch, self._last.compute_loss
        self.drop()
        return caught

    def drop(self) -> None:
        """Let go of the last one; no more are kept. Harmless when none is."""
        if self._last is not None:
            self._last.remove()
        self._last = None


class LastBatch:
    """Keeps the last batch that `model` was trained on, until `remove()`.

    Where the loss is not the model's own, because the loop makes one (the Trainer's label smoothing or preferences, a
    `compute_loss` of the user's), or takes several calls of the model, the batch is what makes the loss was given, and
    `compute_loss` is set.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch: dict[str, Any] | None = None
        self.compute_loss: ComputeLoss | None = None
        self._given: tuple[dict[str, Any], ComputeLoss] | None = None
        self._own: Node | None = None
        """What the model's own loss was made by, until the Trainer has returned its loss."""
        self._num_calls = 0
        """Of the model, since the last batch was given, or the micro-batch began."""
        self._is_told_of_each = False
        """Whether each micro-batch is said to begin."""
        self._is_certain = False
        self._hook = model.register_forward_hook(self._keep, with_kwargs=True)

    def remove(self) -> None:
        """Keep nothing more, and let go of the batch. Harmless when called again."""
        self._hook.remove()
        self.batch = self.compute_loss = self._given = self._own = None

    def begin(self) -> None:
        """The next micro-batch begins, or the present one anew."""
        self._num_calls, self._is_told_of_each = 0, True

    def given(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """`compute_loss` is about to make the loss of `inputs`; None where only the model can make one.

        Unless `is_certain`, it may turn out to be a multiple of the model's own loss.
        """
        if not isinstance(inputs, Mapping) or compute_loss is None:
            return
        self._given, self._num_calls = (dict(inputs), compute_loss), 0  # a copy: the Trainer takes the labels out
        self._is_certain = is_certain
        if is_certain:
            self.batch, self.compute_loss = self._given

    def loss_is_made(self, result: Any) -> None:
        """`compute_loss` has returned `result`, made of other outputs unless it is a multiple of the model's loss."""
        loss = result[0] if isinstance(result, tuple) else result
        if self._given is not None and self._own is not None and not _leads_to(loss.grad_fn, self._own):
            self.batch, self.compute_loss = self._given
        self._own = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or self._is_certain:
            return
        self._num_calls += 1
        loss: Any = getattr(output, "loss", None)
        is_whole = self._num_calls == 1 and kwargs and loss is not None
        self._own = loss.grad_fn if self._given is not None and is_whole else None
        if self._given is not None and not is_whole:
            self.batch, self.compute_loss = self._given
        elif kwargs and loss is not None:
            is_one = self._num_calls == 1 or self._given is not None or not self._is_told_of_each
            self.batch, self.compute_loss = by_name(module, args, kwargs) if is_one else None, None


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """All arguments of a call by name; None if those without have none."""
    parameters = list(inspect.signature(module.forward).parameters.values())[: len(args)] if args else []
    if len(parameters) < len(args) or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return {**{p.name: given for p, given in zip(parameters, args, strict=True)}, **kwargs}


def _leads_to(node: Node | None, wanted: Node) -> bool:
    """Whether one path alone leads from `node` down the graph, and to `wanted`: a loss that was scaled."""
    while node is not None and node is not wanted:
        following = [child for child, _ in node.next_functions if child is not None]
        node = following[0] if len(following) == 1 else None
    return node is wanted
