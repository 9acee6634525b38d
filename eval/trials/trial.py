"""One point of a table: a method on a subject. Gradients are checked, the peak is measured, and steps are timed.

Each trial runs in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import CLOCKS
from adacc_hf.eval.records.records import Figures, WrongResultError
from adacc_hf.eval.trials import methods, peer_methods
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
from adacc_hf.eval.trials.isolation import CannotRunError, OverLimitError
from adacc_hf.eval.trials.methods import Bench, Budget, InstalledMethod, Method, Promise
from adacc_hf.eval.trials.model_under_test import Batch, Subject, first_sequences
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import is_out_of_memory

FAMILIES: dict[str, dict[str, Method]] = {"paper": methods.METHODS, "peers": peer_methods.PEERS}

MEMORY = ("static_bytes", "peak_bytes", "reserved_bytes")
"""Figures of a trial that are counted in bytes."""


def run_trial(
    subject: Figures,
    family: str,
    method: str,
    budget: Budget | None = None,
    limit_bytes: int | None = None,
    rounds: int = 0,
    clock: str = "wall",
    threads: int = 1,
    gate: bool = True,
) -> Figures:
    """Check the gradients of one method, measure its peak bytes, and time `rounds` whole training steps.

    `subject` has the fields of a Subject. Raise WrongResultError, OverLimitError, CannotRunError, InfeasibleBudgetError
    and torch.OutOfMemoryError.
    """
    torch.set_num_threads(threads)
    trial_subject, trial_method = Subject(**subject), FAMILIES[family][method]
    if obstacle := trial_method.obstacle(trial_subject.device):
        raise CannotRunError(obstacle)
    _limit_device(trial_subject.device, limit_bytes)
    model, batch = trial_subject.model(), trial_subject.example()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    bench = Bench(subject=trial_subject, model=model, batch=batch, optimizer=optimizer)
    warm_up(bench)
    reference = reference_gradients(trial_subject, model, batch) if gate else None
    if reference is not None and trial_method.is_compiled:
        reference = replace(reference, compiled=compiled_gradients(trial_subject, model, reference.batch))
    installed = trial_method.install(bench, budget)
    figures: Figures = {"decided": installed.facts}
    if reference is not None:
        figures["gate"] = check(trial_subject, model, installed, reference)
    if trial_subject.device == "cuda":
        torch.cuda.empty_cache()  # the method does not need the memory of the gradient check and of profiling
    figures |= memory_figures(bench, installed)
    check_limit(figures, limit_bytes)
    if rounds:
        figures |= _speed_figures(bench, installed, rounds, CLOCKS[clock])
    return figures


ALLOCATOR_ROOM = 0.1
"""Fraction of the limit that the allocator may keep beyond the limit. The allocator counts free blocks too, and unmaps
and maps them again before it refuses a request. Close to the limit this happens in every step. An artificial limit
should not cause this cost. A step's live bytes decide whether the limit is met."""


def _limit_device(device: str, limit_bytes: int | None) -> None:
    """Make a GPU refuse allocations far beyond the limit, like a smaller GPU."""
    if device == "cuda" and limit_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (1.0 + ALLOCATOR_ROOM) * limit_bytes / total))


def num_alloc_retries(device: torch.device) -> int:
    """Return the number of times that a GPU's allocator freed its cached blocks to serve a request.

    Each time takes milliseconds.
    """
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


def warm_up(bench: Bench) -> None:
    """Run one step under checkpointing on one sequence, which creates the optimizer's state with the least memory."""
    switch_checkpointing(bench.model, on=True)
    try:
        bench.subject.train_step(bench.model, first_sequences(bench.batch, 1), bench.optimizer)
    finally:
        switch_checkpointing(bench.model, on=False)


def memory_figures(bench: Bench, installed: InstalledMethod) -> Figures:
    """Measure the bytes of whole training steps in the steady state."""
    static_bytes, peak_bytes = methods.measure_steady_step(bench, installed.call)
    figures = {"static_bytes": static_bytes, "peak_bytes": peak_bytes}
    if bench.subject.device == "cuda":
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return figures


def check_limit(figures: Figures, limit_bytes: int | None) -> None:
    """Raise OverLimitError with the bytes among `figures` if a step takes more than the limit."""
    if limit_bytes is not None and figures["peak_bytes"] > limit_bytes:
        text = f"the step takes {format_bytes(figures['peak_bytes'])}, the limit is {format_bytes(limit_bytes)}"
        raise OverLimitError(text, {name: value for name, value in figures.items() if name in MEMORY})


def _speed_figures(bench: Bench, installed: InstalledMethod, rounds: int, now: Callable[[], float]) -> Figures:
    """Time `rounds` whole training steps in the steady state. Return tokens per second and the allocator's retries."""
    step = partial(bench.subject.train_step, installed.call, bench.batch, bench.optimizer)
    device = torch.device(bench.subject.device)
    retries = num_alloc_retries(device)
    samples = [seconds_of(step, device, now) for _ in tqdm(range(rounds), desc="timing", unit="step", leave=False)]
    retries = num_alloc_retries(device) - retries
    tokens = bench.batch["input_ids"].numel()
    speed = Spread.of([tokens / seconds for seconds in samples])
    step_ms = Spread.of([1e3 * seconds for seconds in samples])
    return to_json({"step_ms": step_ms, "tokens_per_second": speed, "num_alloc_retries": retries})


# Gradient check before timing: a method must train with the gradients that it promises.
#
# The reference gradients come from plain training on the same model and batch. If plain training does not fit into
# memory, HF gradient checkpointing gives the reference. If that does not fit either, the batch is reduced to fewer
# sequences.

GATE_STEPS = 3
"""Steps whose gradients are checked: the first records the blocks, the second learns the order of backward, and the
third is steady. These steps also serve as warm-up."""

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
    compiled: Gradients | None = None
    """For a compiled method: gradients of the compiled model without a budget for activations."""


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


def compiled_gradients(subject: Subject, model: PreTrainedModel, batch: Batch) -> Gradients:
    """Return the gradients of torch.compile's default. The seed decides its dropout masks, as those under a budget."""
    gradients = in_host_memory(step_gradients(subject, model, torch.compile(model), batch))
    torch.compiler.reset()  # the method compiles the model again
    return gradients


def check(subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference) -> dict[str, Any]:
    """Check the gradients over steps from the first to the steady state, and return the figures.

    `gradient_error` is the largest relative error, and `rounding` what another order of sums may cause. If masks are
    the method's own, the error is against the reference's compiled gradients, if their loss is equal.
    Raise WrongResultError if the method does not keep its promise.
    """
    steps = [_step_errors(subject, model, installed, reference, step) for step in range(GATE_STEPS)]
    names = set.intersection(*map(set, steps))
    worst = {name: max(errors[name] for errors in steps) for name in sorted(names)}
    sums_differ = installed.other_sums or installed.promise.is_own
    return {
        "promise": installed.promise.value,
        "reference": reference.name,
        "sequences": len(reference.batch["input_ids"]),
        "rounding": ROUNDING[subject.precision] if sums_differ else 0.0,
        **worst,
    }


def _step_errors(
    subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference, step: int
) -> dict[str, float]:
    """Return the errors of one step's gradients. Raise WrongResultError if they break the method's promise. The step's
    gradients are freed before the next step."""
    gradients = step_gradients(subject, model, installed.call, reference.batch)
    if installed.promise.is_own:
        own = in_host_memory(gradients)
        slope_error = _check_own_loss(subject, model, installed, reference, own)
        compiled = reference.compiled
        if compiled is None or abs(own.loss / compiled.loss - 1.0) > ROUNDING[subject.precision]:
            return {"slope_error": slope_error}
        return {"slope_error": slope_error, "gradient_error": relative_error(compiled, own)}
    error = checked_error(
        reference.gradients,
        gradients,
        noise=reference.noise,
        rounding=ROUNDING[subject.precision] if installed.other_sums or subject.device == "cuda" else 0.0,
        is_lossy=installed.promise is Promise.LOSSY,
        label=f"step {step + 1}, compared with {reference.name}",
    )
    return {"gradient_error": error}


def _check_own_loss(
    subject: Subject, model: nn.Module, installed: InstalledMethod, reference: Reference, gradients: Gradients
) -> float:
    """Return the relative error of the loss's slope, as predicted by the gradient, under the same dropout masks. Noise
    of relative size e in a gradient changes the slope along the gradient by e squared only: the component of the noise
    across the true gradient makes the step longer, but does not change the loss."""
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
