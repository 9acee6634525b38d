"""The training step around the micro-batch that a profile measures: optimizer, accumulation and loss function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from adacc_hf.price.heads import ComputeLoss

NoSync = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context in which ranks do not exchange gradients. It is used for all micro-batches of a step
but the last."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Optimizer, batches and loss of the training step to profile. `profile_model` describes the fields."""

    optimizer: torch.optim.Optimizer | None = None
    """Optimizer whose state and step are part of the profile. If None, the profile has no optimizer."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches in a step, 1 or more."""
    prefetched_batches: int = 0
    """Number of batches of later steps that are already on the model's device, 0 or more."""
    optimizer_step_bytes: int = 0
    """Temporary bytes of gradient clipping and the optimizer's step, 0 or more."""
    optimizer_state_bytes: int = 0
    """Bytes of state that the optimizer has yet to create, 0 or more."""
    compute_loss: ComputeLoss | None = None
    """Function that returns the loss. None for a model whose output has a loss."""
    no_sync: NoSync | None = None
    """Context of all micro-batches but the last. None if ranks exchange gradients in every micro-batch."""

    @property
    def leaves_gradients(self) -> bool:
        """True if a micro-batch starts with the gradients of earlier ones. With `no_sync`, gradients of later
        micro-batches are sharded."""
        return self.gradient_accumulation_steps > 1 and self.no_sync is None

    def check(self) -> None:
        """Raise ValueError if a field is out of range."""
        minimums = {
            "gradient_accumulation_steps": 1,
            "prefetched_batches": 0,
            "optimizer_step_bytes": 0,
            "optimizer_state_bytes": 0,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}={value!r} must be an int of at least {minimum}")

    def other_batches_bytes(self, batch_bytes: int) -> int:
        """Return the bytes of all batches on the device except the profiled batch, if each batch takes
        `batch_bytes`."""
        return (self.gradient_accumulation_steps - 1 + self.prefetched_batches) * batch_bytes
