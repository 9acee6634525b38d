"""Measurement of the memory of the optimizer's step and of its state."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from adacc_hf.torch_glue.memory import distinct_bytes, optimizer_tensors
from adacc_hf.torch_glue.meters import MemoryMeter


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


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes of the tensors that `optimizer` holds on `device` in addition to the model's parameters."""
    return distinct_bytes([tensor for tensor in optimizer_tensors(optimizer) if tensor.device == device])
