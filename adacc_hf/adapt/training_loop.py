"""TrainingLoop: the facts about a training loop that a session asks for, here for a user's own loop.

The subclass for the Trainer is in `callbacks/trainer_loop.py`. An adapter of another trainer derives its own subclass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from adacc_hf.price.training_step import NoSync
from adacc_hf.torch_glue.distributed import is_first_rank

NO_BATCH = (
    "AdaccSession saw no batch: within session.step(batch), the model has to be called once, in train mode, with "
    "gradients on and with keyword arguments, and its output needs a .loss. Pass labels=... to the model (and not "
    "return_dict=False), or give the function that makes the loss: "
    "AdaccSession(..., compute_loss=lambda model, batch: ...)"
)


class TrainingLoop:
    """Facts about a user's own training loop, and contexts for profiling within it."""

    no_batch = NO_BATCH
    """Text of the error that is raised if no batch can be profiled."""

    def __init__(self, num_micro: int = 1, folder: str | None = None) -> None:
        self.num_micro = num_micro
        """Micro-batches of a step: counted in the last step, assumed in the first."""
        self.folder = folder
        """Folder for the run's policy, profile and history. None writes no files."""
        self.autocast: tuple[torch.dtype, bool] | None = None
        """(dtype, True if casts are cached) of the autocast around the model's last call; None without autocast."""
        self._device_type = "cpu"

    @property
    def clips(self) -> bool:
        """True if gradients may be clipped before the optimizer's step."""
        return True

    @property
    def is_first_rank(self) -> bool:
        """True if this process writes files."""
        return is_first_rank()

    def note_autocast(self, device_type: str) -> None:
        """Record the current autocast setting, so that the model is profiled under the same one."""
        self._device_type, is_on = device_type, torch.is_autocast_enabled(device_type)
        self.autocast = (torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()) if is_on else None

    def profiling(self) -> AbstractContextManager[Any]:
        """Return a context for running the model outside training, as profiling does, under the loop's autocast."""
        if self.autocast is None:
            return nullcontext()
        dtype, caches = self.autocast
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=caches)

    def num_prefetched(self, device: torch.device) -> int:
        """Return the number of batches that the loop has on `device` for steps to come."""
        return 0

    def num_before_step(self, device: torch.device) -> int:
        """Return the number of batches on `device` when a step begins. Measurements of the step do not include them."""
        return int(device.type == "cpu")

    def no_sync(self, model: nn.Module) -> NoSync | None:
        """Return the `no_sync` context maker, if micro-batches before a step's last delay the gradient exchange."""
        return None
