"""Largest batches and longest sequences that a device can train on, by training method (`adacc plan --largest`)."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.fake_model import fake_model
from adacc_hf.estimate.planning import METHODS, Request, TrainingPlanner, fully_recomputed, plain_ms
from adacc_hf.reports.text_table import table_lines
from adacc_hf.solve.plan_pools import most_tiled
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import quick_least_policy, solve_policy

log = logging.getLogger(__name__)

EXACT, TILED = "adacc, exact", "recomputation, tiles and chunked head"
SEARCH_LIMIT = 2**20
"""Upper end of the searches for the largest batch size and the longest sequence."""
LENGTH_STEP = 8
"""Step in tokens of the search for the longest sequence. For other lengths than multiples of 8, attention kernels pad
copies of the mask. A longer sequence may then take less memory than a shorter one, but the search needs memory that
grows with the length."""
MAX_GROWTH = 32
"""Upper limit of the search's next guess, as a multiple of the largest number that fits."""
MAX_STALLS = 3
"""Number of consecutive guesses that may shrink the interval by less than half. Then the interval is bisected."""
LARGEST_METHODS = (METHODS[0], METHODS[1], TILED, EXACT, METHODS[2])
"""Training methods that are compared. Three have no policy: plain training, full recomputation, and full recomputation
with modules that run on some rows at a time. Two use a policy: one with exact actions only, and one with all
actions."""


@dataclass(frozen=True, kw_only=True)
class LargestShapes:
    """Largest batch and longest sequence that one training method fits into the budget."""

    method: str
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
            largest.append(_shapes_of(method, planner, max(1, batch_size), max(request.seq_len, seq_len)))
            batch_size, seq_len = largest[-1].batch_size, largest[-1].seq_len
        return largest


def _shapes_of(method: str, planner: TrainingPlanner, batch_start: int, length_start: int) -> LargestShapes:
    """Search for the largest batch and the longest sequence of `method`, from the given first guesses on."""
    request = planner.request
    config = request.workload.adacc
    config = config.with_overrides(exact=True) if method == EXACT else config
    longest = request.longest_seq_len or SEARCH_LIMIT
    at_zero = planner.static.resting_bytes - request.budget

    @cache
    def excess(batch_size: int, seq_len: int) -> int:
        policy = _least_policy(method, planner.profile_at(batch_size, seq_len), config)
        return policy.predicted_peak_bytes - request.budget

    def length(steps: int) -> int:  # leaves room for a token of text beside images
        return min(max(LENGTH_STEP * steps, planner.model.image_tokens + 1), longest)

    batch_size = largest_fitting(lambda n: excess(n, request.seq_len), batch_start, SEARCH_LIMIT, at_zero)
    steps = largest_fitting(
        lambda n: excess(request.batch_size, length(n)),
        length_start // LENGTH_STEP,
        -(-longest // LENGTH_STEP),
        at_zero,
    )
    requested_fits = excess(request.batch_size, request.seq_len) <= 0
    seq_len = max(length(steps) if steps else 0, request.seq_len if requested_fits else 0)
    return LargestShapes(
        method=method,
        batch_size=batch_size,
        seq_len=seq_len,
        is_at_limit=seq_len == request.longest_seq_len,
        ms_per_token=_ms_per_token(method, planner, config, seq_len) if seq_len else None,
    )


def largest_fitting(excess: Callable[[int], int], start: int, limit: int, at_zero: int) -> int:
    """Return the largest n from 1 to `limit` with excess(n) <= 0, or 0 if no n fits.

    `excess` must not decrease with n. The search starts at n = `start`. Each next n is where a polynomial through the
    three nearest points is 0, because memory is nearly quadratic in n. `at_zero` is an estimate of excess(0).
    """
    points: dict[int, int] = {}
    low, high, stalls = 0, limit + 1, 0
    guess = min(max(start, 1), limit)
    while low + 1 < high:
        width = high - low
        points[guess] = excess(guess)
        low, high = (guess, high) if points[guess] <= 0 else (low, guess)
        stalls = stalls + 1 if 2 * (high - low) > width else 0
        guess = (low + high) // 2
        if stalls <= MAX_STALLS:
            candidates = range(low + 1, min(high, MAX_GROWTH * low) if low else high)
            curve = _interpolation(points if len(points) > 1 else {0: at_zero, **points}, low, high)
            guess = max(low + bisect_right(candidates, 0.0, key=curve), low + 1)
    return low


def _interpolation(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """Return the polynomial through the points at `low` and `high`, and those nearest to zero, of three points."""
    nodes = sorted(points, key=lambda n: (n not in (low, high), abs(points[n])))[:3]

    def value(n: int) -> float:
        return sum(points[a] * math.prod((n - b) / (a - b) for b in nodes if b != a) for a in nodes)

    return value


def _least_policy(method: str, profile: Profile, config: AdaccConfig) -> Policy:
    """Return the policy of `method` with the least peak: for TILED full recomputation, with a chunked head and row-wise
    modules in tiles if the profile has them."""
    if method == METHODS[0]:
        return uniform_policy(profile, "retain")
    if method == TILED:
        profile = most_tiled(profile.with_head("chunked" if "chunked" in profile.heads else profile.head))
    return fully_recomputed(profile) if method in (METHODS[1], TILED) else quick_least_policy(profile, config)


def _ms_per_token(method: str, planner: TrainingPlanner, config: AdaccConfig, seq_len: int) -> float | None:
    request = planner.request
    profile = planner.profile_at(request.batch_size, seq_len)
    try:
        is_solved = method in (EXACT, METHODS[2])
        policy = solve_policy(profile, request.budget, config) if is_solved else _least_policy(method, profile, config)
    except InfeasibleBudgetError:
        return None
    return (plain_ms(profile) + policy.predicted_overhead_ms) / (request.batch_size * seq_len)


def largest_text(request: Request, largest: list[LargestShapes]) -> str:
    """Return the results of `largest_shapes` as a text table."""
    plain = next(each for each in largest if each.method == METHODS[0])
    rows = [("", "largest batch", "longest sequence", "of plain's", "ms per 1,000 tokens")]
    for each in largest:
        length = f"{each.seq_len:,}{' (the context)' if each.is_at_limit else ''}" if each.seq_len else "none"
        ratio = f"{each.seq_len / plain.seq_len:.1f}" if plain.seq_len else "-"
        time = "-" if each.ms_per_token is None else f"{1e3 * each.ms_per_token:.1f}"
        rows.append((each.method, f"{each.batch_size:,}" if each.batch_size else "none", length, ratio, time))
    title = (
        f"{request.model}: largest batch of sequences of {request.seq_len} tokens, and longest sequence in batches of "
        f"{request.batch_size}, per device within {format_bytes(request.budget)}, on {request.workload.device.title}"
    )
    return "\n".join([title, "", *table_lines(rows, right=range(1, 5))])


def largest_json(request: Request, largest: list[LargestShapes]) -> dict[str, object]:
    """Return the results of `largest_shapes` as a JSON record."""
    return {
        "model": request.model,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "budget_bytes": request.budget,
        "largest": {each.method: vars(each) for each in largest},
    }
