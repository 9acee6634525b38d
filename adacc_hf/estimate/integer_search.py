"""Search for the largest batch size or sequence length that fits a memory budget, with few evaluations.

Few evaluations suffice because the excess over the budget is nearly a polynomial of low degree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

NUM_INTERPOLATED = 3
"""Number of known points to which a polynomial is fitted for the next guess. Memory is at most quadratic in the
sequence length."""
MAX_STALLS = 3
"""Number of consecutive guesses that may shrink the search interval by less than half. After one more such guess, the
interval is bisected."""

MAX_GROWTH = 32
"""Upper limit of the next guess, as a multiple of the largest n that is known to fit. Extrapolation further than this
is inaccurate."""


def largest_fitting(excess: Callable[[int], int], start: int, limit: int, hints: Mapping[int, int]) -> int:
    """Return the largest n from 1 to `limit` with excess(n) <= 0, or 0 if no n fits.

    For example, n is a batch size, and `excess(n)` is the peak at this size minus the budget, in bytes. `excess` must
    not decrease with n. The search starts at n = `start`. Each next n is the point where a polynomial through the
    nearest known points is 0. `hints` contains known values of excess(n) by n. The value at n = 0 may be an estimate.

    The excess of the result n and of n + 1 was evaluated.
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
        guess = middle if stalls > MAX_STALLS else _last_nonpositive(_interpolated_excess(points, low, high), low, end)
    return low


def _interpolated_excess(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """Return Newton's polynomial through the points at `low` and `high`, and those of the smallest absolute excess."""
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
    """Return the last n strictly between `low` and `high` with value(n) <= 0, or any other n between them."""
    below, above = low, high
    while below + 1 < above:
        middle = (below + above) // 2
        if value(middle) <= 0:
            below = middle
        else:
            above = middle
    return min(max(below, low + 1), high - 1)
