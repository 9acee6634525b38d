"""Search for the largest integer that fits, with few evaluations if the excess is nearly a low-degree polynomial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

NUM_INTERPOLATED = 3
"""Points that the next guess is interpolated from: memory is at most quadratic in the sequence length."""
MAX_STALLS = 3
"""Consecutive guesses that may leave more than half of the interval. After these, the search bisects once."""

MAX_GROWTH = 32
"""Upper limit of the next guess as a multiple of the largest n that fits so far, because extrapolation is rough."""


def largest_fitting(excess: Callable[[int], int], start: int, limit: int, hints: Mapping[int, int]) -> int:
    """Return the largest n from 1 to `limit` with excess(n) <= 0, or 0 if there is none.

    `excess` must not decrease with n. The search starts at `start`, and continues where the polynomial through the
    nearest known points is 0. `hints` are known points (n, excess(n)); the one at n = 0 may be an estimate.
    """
    points = dict(hints)
    low, high, stalls = 0, limit + 1, 0
    guess = min(max(start, 1), limit)
    while low + 1 < high:
        previous_width = high - low
        points[guess] = excess(guess)
        if points[guess] <= 0:
            low = guess
        else:
            high = guess
        stalls = stalls + 1 if 2 * (high - low) > previous_width else 0
        middle = (low + high) // 2
        end = min(high, MAX_GROWTH * low) if low else high
        guess = middle if stalls > MAX_STALLS else _last_nonpositive(_interpolate(points, low, high), low, end)
    return low


def _interpolate(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """Return the polynomial through the points at `low` and `high` and the points nearest to 0 (divided differences).

    The method is Newton's; at most NUM_INTERPOLATED points are used.
    """
    exact = [n for n in points if n > 0]
    nodes = sorted(exact if len(exact) > 1 else points, key=lambda n: (n not in (low, high), abs(points[n]), n))
    nodes = nodes[:NUM_INTERPOLATED]
    terms = [float(points[n]) for n in nodes]
    for order in range(1, len(nodes)):
        for i in range(len(nodes) - 1, order - 1, -1):
            terms[i] = (terms[i] - terms[i - 1]) / (nodes[i] - nodes[i - order])

    def value(n: int) -> float:
        total = 0.0
        for node, term in zip(reversed(nodes), reversed(terms), strict=True):
            total = total * (n - node) + term
        return total

    return value


def _last_nonpositive(value: Callable[[int], float], low: int, high: int) -> int:
    """Return the last n strictly between `low` and `high` with value(n) <= 0.

    If `value` decreases somewhere, the result is some n strictly between them.
    """
    below, above = low, high
    while below + 1 < above:
        middle = (below + above) // 2
        if value(middle) <= 0:
            below = middle
        else:
            above = middle
    return min(max(below, low + 1), high - 1)
