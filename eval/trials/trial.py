"""One point of a table: a method on a subject. Gradients are checked, the peak is measured, and steps are timed.

Each trial runs in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.clock import CLOCKS
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials import methods, peer_methods
from adacc_hf.eval.trials.barrier import check, reference_gradients
from adacc_hf.eval.trials.isolation import CannotRunError, OverLimitError
from adacc_hf.eval.trials.methods import Bench, Budget, InstalledMethod, Method
from adacc_hf.eval.trials.model_under_test import Subject, first_sequences
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.torch_glue.compat import switch_checkpointing

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
