"""Largest batches and longest sequences that a device can train on, by training method (`adacc plan --largest`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.fake_model import fake_model
from adacc_hf.estimate.plan_report import plan_table
from adacc_hf.estimate.planning import (
    EXACT,
    METHODS,
    TILED,
    Request,
    TrainingPlanner,
    fully_recomputed,
    plain_ms,
    tiled_checkpointing,
    tiled_title,
)
from adacc_hf.solve.solver import solve_policy

log = logging.getLogger(__name__)

LARGEST_METHODS = (METHODS[0], METHODS[1], TILED, EXACT, METHODS[2])
"""Training methods that are compared. Three have no policy: plain training, full recomputation, and full recomputation
with modules that run on some rows at a time. Two use a policy: one with exact actions only, and one with all
actions."""


@dataclass(frozen=True, kw_only=True)
class LargestShapes:
    """Largest batch and longest sequence that one training method fits into the budget."""

    method: str
    title: str
    """Name of the method in the table. TILED is named by the parts that this model and this batch have."""
    batch_size: int
    """Largest number of sequences of the requested length. 0 if none fits."""
    seq_len: int
    """Length in tokens of the longest sequence at the requested batch size. 0 if none fits."""
    is_at_limit: bool
    """True if the model's context length limits the sequence, not the memory."""
    ms_per_token: float | None
    """Predicted time of forward and backward per token, for the longest sequence. None if no sequence fits."""


def largest_shapes(request: Request) -> list[LargestShapes]:
    """Return, for each of LARGEST_METHODS, the largest batch and the longest sequence that fit the budget of `request`.
    Sequences are searched up to the model's context length.

    Raises the errors of `planning.plan`.
    """
    log.info("building %s without memory", request.model)
    with fake_model(request.workload) as model:
        planner = TrainingPlanner(request, model)
        planner.check_budget()
        largest: list[LargestShapes] = []
        batch_size, seq_len = request.batch_size, request.seq_len
        for method in LARGEST_METHODS:  # each search starts at the previous method's result
            log.info("searching for the largest batch and the longest sequence: %s", method)
            batch_size = planner.largest_batch(method, max(1, batch_size))
            seq_len = planner.longest_seq_len(method, max(request.seq_len, seq_len))
            profile = planner.profile_at(request.batch_size, seq_len if seq_len >= 2 else request.seq_len)
            largest.append(
                LargestShapes(
                    method=method,
                    title=tiled_title(profile) if method == TILED else method,
                    batch_size=batch_size,
                    seq_len=seq_len,
                    is_at_limit=seq_len == request.longest_seq_len,
                    ms_per_token=_ms_per_token(planner, profile, method, seq_len) if seq_len >= 2 else None,
                )
            )
        return largest


def _ms_per_token(planner: TrainingPlanner, profile: Profile, method: str, seq_len: int) -> float | None:
    request = planner.request
    overhead_ms = 0.0
    if method == METHODS[1]:
        overhead_ms = fully_recomputed(profile).overhead_ms
    elif method == TILED:
        overhead_ms = tiled_checkpointing(profile).overhead_ms
    elif method != METHODS[0]:
        try:
            overhead_ms = solve_policy(profile, request.budget, planner.config_of(method)).predicted_overhead_ms
        except InfeasibleBudgetError:
            return None
    return (plain_ms(profile) + overhead_ms) / (request.batch_size * seq_len)


def largest_text(request: Request, largest: list[LargestShapes]) -> str:
    """Return the results of `largest_shapes` as a text table."""
    plain = next(each for each in largest if each.method == METHODS[0])
    rows = [("", "largest batch", "longest sequence", "of plain's", "ms per 1,000 tokens")]
    for each in largest:
        length = f"{each.seq_len:,}{' (the context)' if each.is_at_limit else ''}" if each.seq_len else "none"
        ratio = f"{each.seq_len / plain.seq_len:.1f}" if plain.seq_len else "-"
        time = "-" if each.ms_per_token is None else f"{1e3 * each.ms_per_token:.1f}"
        rows.append((each.title, f"{each.batch_size:,}" if each.batch_size else "none", length, ratio, time))
    title = (
        f"{request.model}: largest batch of sequences of {request.seq_len} tokens, and longest sequence in batches of "
        f"{request.batch_size}, per device within {format_bytes(request.budget)}, on {request.workload.device.title}"
    )
    return "\n".join([title, "", *plan_table(rows)])


def largest_json(request: Request, largest: list[LargestShapes]) -> dict[str, object]:
    """Return the results of `largest_shapes` as a JSON record."""
    return {
        "model": request.model,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "budget_bytes": request.budget,
        "largest": {each.method: vars(each) for each in largest},
    }
