"""The memory of what follows a step's last backward: gradient clipping and the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from adacc_hf.memory import MemoryMeter, distinct_bytes
from adacc_hf.tapes.local_tensors import local_of


class OptimizerMeter(AbstractContextManager["OptimizerMeter"]):
    """Counts what `optimizer.step()` inside it allocates for a while; `nbytes` is there after leaving it.

    State that the optimizer makes in its first step and keeps is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._meter = MemoryMeter.for_device(device)

    def __enter__(self) -> OptimizerMeter:
        self._meter.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._meter.mark(("end",))
        self._meter.__exit__(None, None, None)
        kept = next(point.live_bytes for point in self._meter.points if point.label == ("end",))
        self.nbytes = max(0, self._meter.peak_bytes - kept)


def measure_optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> int:
    """Clip the gradients to `max_norm`, if given, and take the optimizer's step; returns the bytes that took at most.

    For `profile_model(optimizer_step_bytes=...)`, in place of the usual two lines of one training step.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with OptimizerMeter(parameters[0].device) as meter:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return meter.nbytes


def measure_clipping(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that clipping the present gradients takes at most. Changes nothing: scaling is in place and takes none."""
    # The parts of DTensors, since their norm waits for other ranks, and the rest may be no DTensors.
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0
    with OptimizerMeter(gradients[0].device) as meter:
        norm = nn.utils.get_total_norm(gradients)
        torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        del norm
    return meter.nbytes


def coming_state_bytes(optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> int:
    """Bytes of the state that `optimizer` has yet to make for `trained` parameters, a group's share per element.

    Layers that chance left out so far (layerdrop) got no gradient and have none. 0 before the optimizer's first step.
    """
    wanted, found = {id(parameter) for parameter in trained}, 0
    for group in optimizer.param_groups:
        known = [parameter for parameter in group["params"] if optimizer.state.get(parameter)]
        new = [p for p in group["params"] if id(p) in wanted and not optimizer.state.get(p)]
        if known and new:
            found += _state_bytes(optimizer, known) * _num_elements(new) // _num_elements(known)
    return found


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    leaves = [(parameter, leaf) for parameter in parameters for leaf in tree_leaves(optimizer.state[parameter])]
    return distinct_bytes(
        leaf for parameter, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == parameter.device
    )


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
