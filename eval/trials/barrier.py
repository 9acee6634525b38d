"""The gate before the clock: a method must train with the gradients that it promises.

The reference are the gradients of plain training on the same model and batch, or those of HF gradient checkpointing
where plain training does not fit, or those of fewer sequences where that does not fit either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adacc_hf.eval.records.records import RedGateError
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
from adacc_hf.eval.trials.methods import Installed, Promise
from adacc_hf.eval.trials.model_under_test import Subject, first_sequences
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import is_out_of_memory

LOSS_CHANGE = 0.02
"""How far the loss is moved each way to compare its slope with the gradient: far above the rounding of a float32 loss
(1e-6), and small beside the loss itself."""

MAX_SLOPE_ERROR = 0.05
"""Relative. Third derivatives give about 0.01 at LOSS_CHANGE; a backward that drew other dropout masks than its
forward is off by 0.1 and more."""

MAX_LOSS_DIFFERENCE = 0.02
"""Relative, between losses under different dropout masks, whose own spread is below 0.01 for a batch of 1000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What plain training gives."""

    name: str
    batch: Batch
    gradients: Gradients
    noise: float
    """The most that the gradients of runs of the same step are off from the first's, relatively."""


def reference_gradients(subject: Subject, model: PreTrainedModel, batch: Batch) -> Reference:
    """The reference at the most sequences that fit. Raises torch.OutOfMemoryError if one sequence does not."""
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
    others = (step_gradients(subject, model, model, batch) for _ in range(NOISE_RUNS - 1))
    return Reference(name=name, batch=batch, gradients=first, noise=max(relative_error(first, one) for one in others))


def halvings(count: int) -> Iterator[int]:
    """`count` and its halves, down to 1."""
    while count >= 1:
        yield count
        count //= 2


def step_gradients(subject: Subject, model: nn.Module, call: Any, batch: Batch) -> Gradients:
    """Run one forward and backward of `call` with dropout drawn from the subject's seed."""
    return compute_gradients(model, batch, subject.seed, partial(subject.loss, call))


def check(subject: Subject, model: nn.Module, installed: Installed, reference: Reference) -> dict[str, Any]:
    """What the gate measured, over steps from the first to the steady state. Raises RedGateError."""
    worst = max(_step_error(subject, model, installed, reference, step) for step in range(GATE_STEPS))
    measured = "slope_error" if installed.promise.is_own else "gradient_error"
    sequences = len(reference.batch["input_ids"])
    return {"promise": installed.promise.value, "reference": reference.name, "sequences": sequences, measured: worst}


def _step_error(subject: Subject, model: nn.Module, installed: Installed, reference: Reference, step: int) -> float:
    """How far the gradient of one step is off; the step's gradients are gone before the next. Raises RedGateError."""
    found = step_gradients(subject, model, installed.call, reference.batch)
    if installed.promise.is_own:
        return _check_own_loss(subject, model, installed, reference, in_host_memory(found))
    return checked_error(
        reference.gradients,
        found,
        noise=reference.noise,
        rounding=ROUNDING[subject.precision] if installed.other_sums or subject.device == "cuda" else 0.0,
        is_lossy=installed.promise is Promise.LOSSY,
        what=f"step {step + 1}, beside {reference.name}",
    )


def _check_own_loss(
    subject: Subject, model: nn.Module, installed: Installed, reference: Reference, found: Gradients
) -> float:
    """The relative error of the gradient as the slope of the loss it belongs to, under the same dropout masks.

    Noise of relative size e in a gradient changes the slope along it by e squared: across the true gradient it adds to
    the step and not to the loss.
    """
    expected = reference.gradients.loss
    if not abs(found.loss - expected) <= MAX_LOSS_DIFFERENCE * abs(expected):
        raise RedGateError(f"the loss {found.loss:.4f} is not that of {reference.name}, {expected:.4f}")
    squared_norm = float(sum(gradient.double().square().sum() for gradient in found.by_name.values()))
    step = LOSS_CHANGE / squared_norm
    losses = []
    for sign in (1.0, -2.0):  # to one side, from there to the other, and back below
        _move(model, found, sign * step)
        torch.manual_seed(subject.seed)
        losses.append(float(subject.loss(installed.call, reference.batch).detach()))
    _move(model, found, step)
    error = abs((losses[0] - losses[1]) / (2 * LOSS_CHANGE) - 1.0)
    allowed = MAX_SLOPE_ERROR + (MAX_GRADIENT_ERROR**2 if installed.promise is Promise.OWN_LOSSY else 0.0)
    if not error <= allowed:
        raise RedGateError(f"the gradient is not the slope of the loss: relative error {error:.3g}, allowed {allowed}")
    return error


def _move(model: nn.Module, direction: Gradients, scale: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in direction.by_name:
                parameter.add_(direction.by_name[name].to(parameter.device), alpha=scale)
