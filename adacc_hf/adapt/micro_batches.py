"""Records of a run's micro-batches: the sizes of the current one, and the most recent batch, kept for a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from adacc_hf.price.heads import ComputeLoss
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.model_hook import ModelHook, by_name


class MicroBatches:
    """Record of a run's micro-batches: the current sizes and, while a profile is due, the most recent training batch
    itself.

    The sizes are read when a micro-batch begins or, if its tensors do not exist yet, when the model is called.
    """

    def __init__(self) -> None:
        self.shapes: BatchShapes = ()
        self.nbytes = 0
        """Bytes of the tensors in the current or last micro-batch."""
        self.has_shapes = False
        """True if `shapes` belong to the current or last micro-batch. False before the tensors of the current
        micro-batch are known."""
        self._sizes: list[tuple[str, torch.Size]] = []
        self._last: LastBatch | None = None

    @property
    def is_keeping(self) -> bool:
        """True if the most recent training batch is kept in memory, because a profile will need a batch."""
        return self._last is not None

    @property
    def has_called(self) -> bool:
        """True if the model was called for training since batches are kept."""
        return self._last is not None and self._last.has_called

    @property
    def known_shapes(self) -> BatchShapes | None:
        """Shapes of the current or last micro-batch, or None before the micro-batch's tensors are known."""
        return self.shapes if self.has_shapes else None

    def begin(self) -> None:
        """Begin the next micro-batch."""
        self.has_shapes = False
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the model calls of the current micro-batch. Used when the micro-batch begins and before it is
        retried."""
        if self._last is not None:
            self._last.begin()

    def read_shapes(self, inputs: Any) -> bool:
        """Read the micro-batch's shapes from the tensors in the mapping `inputs`, and return True. Return False if the
        shapes are known already, or if `inputs` is not a mapping.

        In reinforcement learning, the tensors are sampled within the step, so they do not always exist when the
        micro-batch begins.
        """
        if self.has_shapes or not isinstance(inputs, Mapping):
            return False
        sizes = [(name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        if sizes != self._sizes:  # skipped for equal sizes: `batch_shapes` takes time
            self._sizes, self.shapes, self.nbytes = sizes, batch_shapes(inputs), batch_bytes(inputs)
        self.has_shapes = True
        return True

    def keep_last(self, model: nn.Module) -> None:
        """Begin to keep the most recent training batch in memory. Further calls have no effect."""
        if self._last is None:
            self._last = LastBatch(model)

    def note_loss_call(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """Record that `compute_loss` is about to be called with `inputs`. See `LastBatch.note_loss_call`."""
        if self._last is not None:
            self._last.note_loss_call(inputs, compute_loss, is_certain)

    def note_loss(self, result: Any) -> None:
        """Record the loss that the training loop computed: `result`, or the first item of a tuple `result`."""
        if self._last is not None:
            self._last.note_loss(result)

    def take(self) -> tuple[dict[str, Any] | None, ComputeLoss | None]:
        """Return the most recent batch and the function that computes its loss. Stop keeping batches.

        The batch is None if no batch is suitable for a profile, and the function is None if the model computes the
        loss. See `LastBatch`.
        """
        assert self._last is not None
        result = self._last.batch, self._last.compute_loss
        self.drop()
        return result

    def drop(self) -> None:
        """Free the most recent batch, and stop keeping batches. Further calls have no effect."""
        if self._last is not None:
            self._last.remove()
        self._last = None


class LastBatch:
    """A forward hook that keeps the most recent batch on which `model` was trained, until `remove()`.

    If training uses the `loss` of the model's output, `batch` contains the arguments of the model's call, and
    `compute_loss` is None. If the loop computes another loss (label smoothing, DPO, a user's `compute_loss`) or calls
    the model several times, `compute_loss` is the loop's function, and `batch` is its argument. If the loop computes
    the loss without such a function, `batch` and `compute_loss` are None.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch: dict[str, Any] | None = None
        self.compute_loss: ComputeLoss | None = None
        self._loss_call: tuple[dict[str, Any], ComputeLoss] | None = None
        """The batch and the function of the last `compute_loss` call that the training loop made."""
        self._own_node: Node | None = None
        """`grad_fn` of the loss that the model returned, until the loss of the training loop is known."""
        self.has_called = False
        """True if the model was called for training."""
        self._num_calls = 0
        """Number of calls of the model since the micro-batch began or `note_loss_call` was called."""
        self._counts_per_batch = False
        """True if `begin` is called for each micro-batch, so that `_num_calls` counts within one micro-batch."""
        self._is_certain = False
        self._hook = model.register_forward_hook(ModelHook(self._keep), with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook, and free the batch. Further calls have no effect."""
        self._hook.remove()
        self.batch = self.compute_loss = self._loss_call = self._own_node = None

    def begin(self) -> None:
        """Begin the next micro-batch, or the retry of the current one."""
        self._num_calls, self._counts_per_batch = 0, True

    def note_loss_call(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """Record that `compute_loss` is about to be called with `inputs`.

        If `compute_loss` is None, the model computes the loss. If `is_certain` is True, a profile must use
        `compute_loss`. Otherwise `note_loss` decides, because `compute_loss` perhaps only scales the model's own loss.
        """
        if not isinstance(inputs, Mapping) or compute_loss is None:
            return
        self._num_calls = 0
        self._loss_call = dict(inputs), compute_loss  # a copy of `inputs`, because the Trainer removes the labels
        self._is_certain = is_certain
        if is_certain:
            self.batch, self.compute_loss = self._loss_call

    def note_loss(self, result: Any) -> None:
        """Record the result of `compute_loss`: the loss, or a tuple that begins with the loss.

        If the loss is the model's own loss, perhaps scaled, a profile does not need `compute_loss`. Otherwise keep
        `compute_loss` for a profile.
        """
        loss = result[0] if isinstance(result, tuple) else result
        if (
            self._loss_call is not None
            and self._own_node is not None
            and not _loss_leads_to(loss.grad_fn, self._own_node)
        ):
            self.batch, self.compute_loss = self._loss_call
        self._own_node = None

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self.has_called = True
        if self._is_certain:
            return
        self._num_calls += 1
        loss: Any = getattr(output, "loss", None)
        has_own_loss = self._num_calls == 1 and kwargs and loss is not None
        self._own_node = loss.grad_fn if self._loss_call is not None and has_own_loss else None
        if self._loss_call is not None and not has_own_loss:
            self.batch, self.compute_loss = self._loss_call
        elif kwargs and loss is not None:
            is_single_call = self._num_calls == 1 or self._loss_call is not None or not self._counts_per_batch
            self.batch, self.compute_loss = by_name(module, args, kwargs) if is_single_call else None, None


def _loss_leads_to(node: Node | None, target: Node) -> bool:
    """Return True if each autograd node on the way from `node` to `target` has a single input.

    The loss with the `grad_fn` `node` is then a scaled copy of the loss with the `grad_fn` `target`.
    """
    while node is not None and node is not target:
        following = [child for child, _ in node.next_functions if child is not None]
        node = following[0] if len(following) == 1 else None
    return node is target
