"""Gradients of one batch, and comparison of two gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.model_under_test import Batch
from adacc_hf.torch_glue.memory import backward, forward_loss
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

NOISE_RUNS = 3
"""Number of runs of the reference. The largest difference between them is the noise. Two runs may be equal by
chance."""

NOISE_FACTOR = 4.0
"""Accepted difference of an exact method, in units of the noise between runs of plain training. The noise is 0 on
a CPU. On a GPU it comes from the order of atomic additions, of which two runs are a small sample."""

ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}
"""Accepted relative difference due to another order of sums, by precision. The units of float32 and bfloat16 are
1e-7 and 8e-3, and rounding errors average out over a gradient. On a GPU with its arbitrary order of atomic
additions, some pairs of runs differ by this much and others not at all."""

MAX_GRADIENT_ERROR = 0.5
"""Relative L2 error at which lossy codecs count as broken. INT4 on everything gives 0.03 to 0.07 for the demo's GPT-2
(eval/results/cpu/throughput.json)."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Loss, and gradients of all parameters by name."""

    loss: torch.Tensor
    by_name: dict[str, torch.Tensor]


def compute_gradients(
    model: nn.Module, batch: Batch, seed: int, loss_of: Callable[[Batch], torch.Tensor] | None = None
) -> Gradients:
    """Run one forward, of the model or by `loss_of`, and backward, with dropout drawn from `seed`.

    Afterwards the model has no gradients.
    """
    torch.manual_seed(seed)
    loss = forward_loss(model, batch) if loss_of is None else loss_of(batch)
    backward(loss)
    by_name = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return Gradients(loss.detach(), by_name)


def in_host_memory(gradients: Gradients) -> Gradients:
    """Return a copy in host memory, because a step may need the whole device memory."""
    return Gradients(gradients.loss.cpu(), {name: tensor.cpu() for name, tensor in gradients.by_name.items()})


def first_difference(expected: Gradients, actual: Gradients) -> str | None:
    """Return the name of the first parameter (or "the loss") that is not bit-equal, or None if all are equal."""
    if not torch.equal(expected.loss.to(actual.loss.device), actual.loss):
        return "the loss"
    if expected.by_name.keys() != actual.by_name.keys():
        return "the set of parameters with a gradient"
    return next((name for name, own, other in _pairs(expected, actual) if not torch.equal(own, other)), None)


def relative_error(expected: Gradients, actual: Gradients) -> float:
    """Return the L2 norm of the difference of the whole gradients, divided by the norm of the expected one, in double
    precision.

    Return infinity if the gradients have different parameters. The computation runs on the device of `actual`, because
    a CPU core would take seconds.
    """
    if expected.by_name.keys() != actual.by_name.keys():
        return math.inf
    norms = [(difference_norm([own], [other]), l2_norm([own])) for _, own, other in _pairs(expected, actual)]
    difference, expected_norm = (torch.linalg.vector_norm(torch.stack(parts)) for parts in zip(*norms, strict=True))
    return float(difference / expected_norm)


def _pairs(expected: Gradients, actual: Gradients) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name, the expected gradient and the actual gradient of each parameter. The expected gradient is moved
    to the device of the actual one. One pair is yielded at a time, to save memory."""
    for name, other in actual.by_name.items():
        yield name, expected.by_name[name].to(other.device), other


def checked_error(
    expected: Gradients, actual: Gradients, *, noise: float, rounding: float, is_lossy: bool, label: str
) -> float:
    """Return the relative error of the whole gradient. Raise WrongResultError if the method does not explain the error.

    noise: relative error between two runs of the reference. rounding: accepted error due to another order of sums. If
    both are 0, the loss must be bit-equal, and, without lossy codecs, the gradient too. label: step and method, for the
    message.
    """
    max_exact_error = NOISE_FACTOR * noise + rounding
    first_differing = first_difference(expected, actual)
    if first_differing is None:
        return 0.0
    error = relative_error(expected, actual)
    loss_error = abs(float(actual.loss) / float(expected.loss) - 1.0)
    max_error = MAX_GRADIENT_ERROR if is_lossy else max_exact_error
    # An error of 0 can be a difference too small for the sum of squares.
    if not (max_error and error <= max_error and loss_error <= max_exact_error):
        raise WrongResultError(
            f"{label}: {first_differing} differs: relative error of the whole gradient {error:.3g}, "
            f"allowed {max_error:.3g}; of the loss {loss_error:.3g}, allowed {max_exact_error:.3g}"
        )
    return error
