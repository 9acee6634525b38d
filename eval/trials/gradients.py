"""Gradients of one batch, and how far two of them are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.eval.trials.workload import Batch
from adacc_hf.memory import backward, forward_loss


@dataclass(frozen=True, slots=True)
class Gradients:
    """The loss and, by name, the gradient of every parameter."""

    loss: torch.Tensor
    by_name: dict[str, torch.Tensor]


def compute_gradients(model: nn.Module, batch: Batch, seed: int) -> Gradients:
    """One forward and backward with dropout drawn from `seed`. The model is left without gradients."""
    torch.manual_seed(seed)
    loss = forward_loss(model, batch)
    backward(loss)
    by_name = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return Gradients(loss.detach(), by_name)


def first_difference(expected: Gradients, found: Gradients) -> str | None:
    """The name of the first thing that is not bit-equal, the loss or a parameter; None if all is."""
    if not torch.equal(expected.loss, found.loss):
        return "the loss"
    if expected.by_name.keys() != found.by_name.keys():
        return "the set of parameters with a gradient"
    differing = (name for name, tensor in expected.by_name.items() if not torch.equal(tensor, found.by_name[name]))
    return next(differing, None)


def relative_error(expected: Gradients, found: Gradients) -> float:
    """L2 norm of the difference of the whole gradients over that of the expected one, in double precision.

    Infinite if they are of different parameters.
    """
    if expected.by_name.keys() != found.by_name.keys():
        return math.inf
    squares = [(found.by_name[name].double() - g.double()).square().sum() for name, g in expected.by_name.items()]
    norm = [gradient.double().square().sum() for gradient in expected.by_name.values()]
    return float((torch.stack(squares).sum() / torch.stack(norm).sum()).sqrt())
