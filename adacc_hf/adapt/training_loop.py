"""What a session has to know of the loop that it serves: answers for a loop of the user's own.

The Trainer's answers stand in `callbacks/trainer.py`. Another trainer's adapter derives a class of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from adacc_hf.price.step_memory import NoSync
from adacc_hf.torch_glue.ranks import is_first_rank

NO_BATCH = (
    "AdaccSession saw no batch: within session.step(batch), no single forward of the model in train mode and with "
    "gradients on returned a loss. Call the model once by keyword arguments, labels among them; or give the session "
    "what makes the loss: AdaccSession(..., compute_loss=lambda model, batch: ...)"
)


class TrainingLoop:
    """A loop of the user's own."""

    no_batch = NO_BATCH
    """The error's text where no batch can be profiled."""

    def __init__(self, num_micro: int = 1, folder: str | None = None) -> None:
        self.num_micro = num_micro
        """Micro-batches of a step, as far as known."""
        self.folder = folder
        """The folder for the files that tell of the run; None for none."""
        self.autocast: tuple[torch.dtype, bool] | None = None
        """(type, whether casts are cached) of the autocast that the model was last called under; None for none."""
        self._device_type = "cpu"

    @property
    def clips(self) -> bool:
        """Whether gradients may be clipped before the optimizer's step."""
        return True

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes files."""
        return is_first_rank()

    def note_autocast(self, device_type: str) -> None:
        """Have the model profiled under the autocast that is on now, if any."""
        self._device_type, is_on = device_type, torch.is_autocast_enabled(device_type)
        self.autocast = (torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()) if is_on else None

    def profiling(self) -> AbstractContextManager[Any]:
        """Return a context around whatever runs the model beside training; it leaves no trace in the loop."""
        if self.autocast is None:
            return nullcontext()
        dtype, caches = self.autocast
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=caches)

    def no_sync(self, model: nn.Module) -> NoSync | None:
        """Return what the micro-batches before a step's last one run in, if that puts off the exchange of gradients."""
        return None
