"""The training step around the micro-batch that a profile measures: optimizer and accumulation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Optimizer and batches of the training step to profile. `profile_model` describes the fields."""

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
