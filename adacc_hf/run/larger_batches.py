"""Warning for training with one fixed policy: a batch is larger than the batch that the policy was made for."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, from_profile_shapes, num_elements
from adacc_hf.torch_glue.model_hook import ModelHook, by_name

log = logging.getLogger(__name__)


class LargerBatches:
    """Forward hook that warns once, at the first batch with more elements than the profiled batch: a fixed policy is
    correct at any size, but its predicted peak is that of the profiled size."""

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._policy = policy
        self._profiled = dict(policy.batch)
        self._hook: RemovableHandle | None = None
        if self._profiled:
            self._hook = model.register_forward_pre_hook(ModelHook(self._forward_begins), with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook that warns about larger batches. Further calls have no effect."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        batch_shapes = {
            name: tuple(tensor.shape)
            for name, tensor in (by_name(module, args, kwargs) or {}).items()
            if name in self._profiled and isinstance(tensor, torch.Tensor)
        }
        shapes = from_profile_shapes(tuple(batch_shapes.items()))
        profiled = from_profile_shapes(tuple((name, self._profiled[name]) for name in batch_shapes))
        ratio = num_elements(shapes) / num_elements(profiled) if profiled else 0.0
        if ratio > 1:
            self._warn(shapes, profiled, ratio)
            self.remove()

    def _warn(self, shapes: BatchShapes, profiled: BatchShapes, ratio: float) -> None:
        """Log the predicted peak at `ratio` times as many elements. Stored bytes may grow faster than assumed."""
        policy = self._policy
        peak = policy.predicted_peak_bytes + (ratio - 1) * policy.predicted_stored_bytes
        log.warning(
            "Adacc: a batch of %s is larger than the one of %s that the policy was made for: the predicted peak of its "
            "step is about %s, compared with %s. Profile the largest batch, or train with "
            "AdaccSession(model, optimizer, memory_budget=...).step(batch), which has a policy for each size",
            describe(shapes),
            describe(profiled),
            format_bytes(round(peak)),
            format_bytes(policy.predicted_peak_bytes),
        )
