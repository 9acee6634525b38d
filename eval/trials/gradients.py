"""Gradients of one batch, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.eval.records.records import RedGateError
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.torch_glue.memory import backward, forward_loss
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

NOISE_RUNS = 3
"""Runs of what is expected that its noise is the worst of: two may be equal by chance."""

NOISE_FACTOR = 4.0
"""What a lossless method may differ by, in units of what plain training differs by from run to run: nothing on a CPU,
and on a GPU the order of atomic additions, of which two runs are a small sample."""

ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}
"""Relative difference, by precision, that another order of sums may make: the units of float32 and bfloat16 are 1e-7
and 8e-3, and what is rounded differently averages out over a gradient. On a GPU, whose atomic additions come in any
order, two runs may differ by it that other two do not."""

MAX_GRADIENT_ERROR = 0.5
"""Relative L2 error from which lossy codecs count as broken. INT4 on everything gives 0.1 to 0.2, and the gradient of
another batch is at 1.3."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The loss and, by name, the gradient of every parameter."""

    loss: torch.Tensor
    by_name: dict[str, torch.Tensor]


def compute_gradients(
    model: nn.Module, batch: Batch, seed: int, loss_of: Callable[[Batch], torch.Tensor] | None = None
) -> Gradients:
    """Run one forward, the model's or `loss_of`, and backward with dropout drawn from `seed`.

    The model is left without gradients.
    """
    torch.manual_seed(seed)
    loss = forward_loss(model, batch) if loss_of is None else loss_of(batch)
    backward(loss)
    by_name = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return Gradients(loss.detach(), by_name)


def in_host_memory(gradients: Gradients) -> Gradients:
    """A copy that takes nothing of a device, where a step may need all there is."""
    return Gradients(gradients.loss.cpu(), {name: tensor.cpu() for name, tensor in gradients.by_name.items()})


def first_difference(expected: Gradients, found: Gradients) -> str | None:
    """The name of the first thing that is not bit-equal, the loss or a parameter; None if all is."""
    if not torch.equal(expected.loss.to(found.loss.device), found.loss):
        return "the loss"
    if expected.by_name.keys() != found.by_name.keys():
        return "the set of parameters with a gradient"
    return next((name for name, own, other in _pairs(expected, found) if not torch.equal(own, other)), None)


def relative_error(expected: Gradients, found: Gradients) -> float:
    """L2 norm of the difference of the whole gradients over that of the expected one, in double precision.

    Infinite if they are of different parameters. Computed where `found` is: a GPU takes no time for what keeps a core
    busy for seconds.
    """
    if expected.by_name.keys() != found.by_name.keys():
        return math.inf
    norms = [(difference_norm([own], [other]), l2_norm([own])) for _, own, other in _pairs(expected, found)]
    off, length = (torch.linalg.vector_norm(torch.stack(some)) for some in zip(*norms, strict=True))
    return float(off / length)


def _pairs(expected: Gradients, found: Gradients) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The gradients of each parameter, the expected one brought to the other: one at a time, for want of memory."""
    for name, other in found.by_name.items():
        yield name, expected.by_name[name].to(other.device), other


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
    loss_error = abs(float(found.loss) / float(expected.loss) - 1.0)
    allowed = MAX_GRADIENT_ERROR if is_lossy else exact
    # An error of 0 is one too small for the sum of squares.
    if not (allowed and error <= allowed and loss_error <= exact):
        raise RedGateError(
            f"{what}: {difference} differs: relative error of the whole gradient {error:.3g}, allowed {allowed:.3g}; "
            f"of the loss {loss_error:.3g}, allowed {exact:.3g}"
        )
    return error
