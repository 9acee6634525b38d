"""Gradient check before timing: a method must train with the gradients that it promises.

The reference gradients come from plain training on the same model and batch. If plain training does not fit into
memory, HF gradient checkpointing gives the reference. If that does not fit either, the batch is reduced to fewer
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.contenders import GATE_STEPS
from adacc_hf.eval.trials.gradients import (
    MAX_GRADIENT_ERROR,
    NOISE_RUNS,
    ROUNDING,
    Gradients,
    checked_error,
    compute_gradients,
    in_host_memory,
    relative_error,
)
from adacc_hf.eval.trials.methods import InstalledMethod, Promise
from adacc_hf.eval.trials.model_under_test import Subject, first_sequences
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import is_out_of_memory

LOSS_CHANGE = 0.02
"""Change of the loss, in each direction, for comparing its slope with the gradient: far above the rounding of a
float32 loss (1e-6), and small compared with the loss."""

MAX_SLOPE_ERROR = 0.05
"""Bound on the relative error of the slope. Third derivatives cause about 0.01 at LOSS_CHANGE. A backward whose dropout
masks differ from its forward's causes 0.1 and more."""

MAX_LOSS_DIFFERENCE = 0.02
"""Bound on the relative difference of losses under different dropout masks, whose spread is below 0.01 for a batch
of 1000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Reference gradients, and their noise."""

    name: str
    batch: Batch
    gradients: Gradients
    noise: float
    """Largest relative difference between the gradients of a repeated run and of the first run."""


def reference_gradients(subject: Subject, model: PreTrainedModel, batch: Batch) -> Reference:
    """Return the reference at the largest number of sequences that fits.

    Raise torch.OutOfMemoryError if not even one fits.
    """
    last: RuntimeError | None = None
    for count in halvings(len(batch["input_ids"])):
        part = first_sequences(batch, count)
        for name in ("plain", "HF gradient checkpointing"):
            try:
                return _measured_reference(subject, model, part, name)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                last = error.with_traceback(None)
                model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
            finally:
                switch_checkpointing(model, on=False)
    assert last is not None
    raise last


def _measured_reference(subject: Subject, model: PreTrainedModel, batch: Batch, name: str) -> Reference:
    if name != "plain":
        switch_checkpointing(model, on=True)
    first = in_host_memory(step_gradients(subject, model, model, batch))
    repeated_runs = (step_gradients(subject, model, model, batch) for _ in range(NOISE_RUNS - 1))
    return Reference(
        name=name, batch=batch, gradients=first, noise=max(relative_error(first, other) for other in repeated_runs)
    )


def halvings(count: int) -> Iterator[int]:
    """Yield `count` and its halves, down to 1."""
    while count >= 1:
        yield count
        count //= 2


def step_gradients(subject: Subject, model: nn.Module, call: Any, batch: Batch) -> Gradients:
    """Run one forward and backward of `call` with dropout drawn from the subject's seed."""
    return compute_gradients(model, batch, subject.seed, partial(subject.loss, call))


def check(subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference) -> dict[str, Any]:
    """Check the gradients over steps from the first to the steady state, and return the figures.

    Raise WrongResultError if the method does not keep its promise.
    """
    worst = max(_step_error(subject, model, installed, reference, step) for step in range(GATE_STEPS))
    error_name = "slope_error" if installed.promise.is_own else "gradient_error"
    sequences = len(reference.batch["input_ids"])
    return {"promise": installed.promise.value, "reference": reference.name, "sequences": sequences, error_name: worst}


def _step_error(
    subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference, step: int
) -> float:
    """Return the gradient error of one step. Raise WrongResultError if the error breaks the method's promise.

    The step's gradients are freed before the next step.
    """
    gradients = step_gradients(subject, model, installed.call, reference.batch)
    if installed.promise.is_own:
        return _check_own_loss(subject, model, installed, reference, in_host_memory(gradients))
    return checked_error(
        reference.gradients,
        gradients,
        noise=reference.noise,
        rounding=ROUNDING[subject.precision] if installed.other_sums or subject.device == "cuda" else 0.0,
        is_lossy=installed.promise is Promise.LOSSY,
        label=f"step {step + 1}, compared with {reference.name}",
    )


def _check_own_loss(
    subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference, gradients: Gradients
) -> float:
    """Return the relative error of the loss's slope, as predicted by the gradient, under the same dropout masks.

    Noise of relative size e in a gradient changes the slope along the gradient by e squared only: the component of the
    noise across the true gradient makes the step longer, but does not change the loss.
    """
    expected = reference.gradients.loss
    if not abs(gradients.loss - expected) <= MAX_LOSS_DIFFERENCE * abs(expected):
        raise WrongResultError(
            f"the loss {gradients.loss:.4f} differs from {expected:.4f}, the loss of {reference.name}, by more than "
            f"{MAX_LOSS_DIFFERENCE:.0%}"
        )
    squared_norm = float(sum(gradient.double().square().sum() for gradient in gradients.by_name.values()))
    step = LOSS_CHANGE / squared_norm
    losses = []
    for sign in (1.0, -2.0):  # one step to one side, then two to the other; below, one step back
        _move(model, gradients, sign * step)
        torch.manual_seed(subject.seed)
        losses.append(float(subject.loss(installed.call, reference.batch).detach()))
    _move(model, gradients, step)
    error = abs((losses[0] - losses[1]) / (2 * LOSS_CHANGE) - 1.0)
    max_error = MAX_SLOPE_ERROR + (MAX_GRADIENT_ERROR**2 if installed.promise is Promise.OWN_LOSSY else 0.0)
    if not error <= max_error:
        raise WrongResultError(
            f"the gradient is not the slope of the loss: relative error {error:.3g}, allowed {max_error}"
        )
    return error


def _move(model: nn.Module, direction: Gradients, scale: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in direction.by_name:
                parameter.add_(direction.by_name[name].to(parameter.device), alpha=scale)
