"""Gradients of one batch, and how far two of them are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.eval.records.records import RedGateError
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.torch_glue.memory import backward, forward_loss
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

NOISE_FACTOR = 4.0
"""What a lossless method may differ by, in units of what plain training differs by from run to run: nothing on a CPU,
and on a GPU the order of atomic additions, of which two runs are a small sample."""

ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}
"""Relative difference, by precision, that another order of sums may make: the units of float32 and bfloat16 are 1e-7
and 8e-3, and what is rounded differently averages out over a gradient."""

MAX_GRADIENT_ERROR = 0.5
"""Relative L2 error from which lossy codecs count as broken. INT4 on everything gives 0.1 to 0.2, and the gradient of
another batch is at 1.3."""


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
    gradients = list(expected.by_name.values())
    return float(difference_norm(gradients, [found.by_name[name] for name in expected.by_name]) / l2_norm(gradients))


def checked_error(
    expected: Gradients, found: Gradients, *, noise: float, rounding: float, is_lossy: bool, what: str
) -> float:
    """The relative error of the whole gradient of `what`. Raises RedGateError if it is more than the method explains.

    noise: the relative error between two runs of what is expected. rounding: what another order of sums may add. Both 0
    ask for the very bits of any loss, and of a gradient without lossy codecs.
    """
    exact = NOISE_FACTOR * noise + rounding
    difference = first_difference(expected, found)
    if difference is None:
        return 0.0
    error = relative_error(expected, found)
    loss_error = float((found.loss.double() / expected.loss.double() - 1.0).abs())
    allowed = MAX_GRADIENT_ERROR if is_lossy else exact
    # An error of 0 is one too small for the sum of squares.
    if not (allowed and error <= allowed and loss_error <= exact):
        raise RedGateError(
            f"{what}: {difference} differs: relative error of the whole gradient {error:.3g}, allowed {allowed:.3g}; "
            f"of the loss {loss_error:.3g}, allowed {exact:.3g}"
        )
    return error
