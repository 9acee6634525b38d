"""Measurement of the memory of gradient clipping and of the optimizer's step, after a step's last backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

from adacc_hf.torch_glue.memory import distinct_bytes, optimizer_tensors
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.tensors import local_of


class OptimizerMeter(AbstractContextManager["OptimizerMeter"]):
    """Context that measures the temporary bytes of an `optimizer.step()`, without the optimizer's state."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._meter = MemoryMeter.for_device(device)

    def __enter__(self) -> OptimizerMeter:
        self._meter.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._meter.mark(("end",))
        self._meter.__exit__(None, None, None)
        end_bytes = next(point.live_bytes for point in self._meter.points if point.label == ("end",))
        self.nbytes = max(0, self._meter.peak_bytes - end_bytes)


def measure_clipping(parameters: Iterable[nn.Parameter]) -> int:
    """Compute the norm of the present gradients, as clipping does, and return the peak of temporary bytes."""
    # Use local parts of DTensors: a DTensor's norm waits for other ranks, and other gradients may be plain tensors.
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0
    with OptimizerMeter(gradients[0].device) as meter:
        norm = nn.utils.get_total_norm(gradients)
        torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        del norm
    return meter.nbytes


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes of the tensors that `optimizer` holds on `device` in addition to the model's parameters."""
    return distinct_bytes(tensor for tensor in optimizer_tensors(optimizer) if tensor.device == device)
