"""Search for the largest batch size or sequence length that fits a memory budget, with few evaluations.

Few evaluations suffice because the excess over the budget is nearly a polynomial of low degree. If the polynomial has
just predicted the excess of the result, the next larger integer is not evaluated either.
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

MIN_NODES = 2
"""Minimum number of evaluated points of a polynomial that replaces an evaluation."""
MAX_ERROR = 0.1
"""Largest error of a prediction that replaces an evaluation, as a fraction of the increase per integer. Measured: 0 to
0.05 for plain training and checkpoints of T5, and 0.1 for policies, whose search estimates the peaks of small
batches."""
MARGIN = 0.05
"""Smallest predicted excess of the next larger integer that replaces an evaluation, as a fraction of the increase per
integer. Smaller numbers are within the rounding of tensors' sizes, which a polynomial does not describe."""


def largest_fitting(excess: Callable[[int], int], start: int, limit: int, hints: Mapping[int, int]) -> int:
    """Return the largest n from 1 to `limit` with excess(n) <= 0, or 0 if no n fits.

    For example, n is a batch size, and `excess(n)` is the peak at this size minus the budget, in bytes. `excess` must
    not decrease with n. The search starts at n = `start`. Each next n is the point where a polynomial through the
    nearest known points is 0. `hints` contains known values of excess(n) by n. The value at n = 0 may be an estimate.

    The result n was evaluated. The excess of n + 1 was evaluated too, unless the polynomial predicts that n + 1 does
    not fit and has predicted the excess of n with a small error. A kink of `excess` between n and n + 1 would then make
    the result too small, but never too large.
    """
    points = dict(hints)
    low, high, stalls = 0, limit + 1, 0
    guess = min(max(start, 1), limit)
    while low + 1 < high:
        previous_width = high - low
        predicted = _interpolated_excess(points, low, high) if _num_evaluated(points) >= MIN_NODES else None
        points[guess] = excess(guess)
        if points[guess] <= 0:
            low = guess
            if predicted is not None and _is_largest(low, points[low], predicted):
                return low
        else:
            high = guess
        stalls = stalls + 1 if 2 * (high - low) > previous_width else 0
        middle = (low + high) // 2
        end = min(high, MAX_GROWTH * low) if low else high
        guess = middle if stalls > MAX_STALLS else _last_nonpositive(_interpolated_excess(points, low, high), low, end)
    return low


def _num_evaluated(points: Mapping[int, int]) -> int:
    """Return the number of points that were evaluated. Points at 0 or below are estimates."""
    return sum(n > 0 for n in points)


def _is_largest(n: int, excess: int, predicted: Callable[[int], float]) -> bool:
    """Return True if `n` fits and n + 1 certainly does not. `excess` is the excess over the budget at `n`, and must be
    at most 0. `predicted` is a polynomial through the excess at other integers. Its increase from n to n + 1 is trusted
    if its error at `n` is at most the fraction MAX_ERROR of this increase."""
    increase, error = predicted(n + 1) - predicted(n), abs(excess - predicted(n))
    return error <= MAX_ERROR * increase and excess + increase > error + MARGIN * increase > 0


def _interpolated_excess(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """Return a polynomial that interpolates the excess over the budget between the integers `low` and `high`. `points`
    contains the excess by integer. At most NUM_INTERPOLATED points are used: those at `low` and `high`, and those with
    the smallest absolute excess. The method is Newton's divided differences."""
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
    """Return the last n strictly between `low` and `high` with value(n) <= 0, found by bisection. If no n qualifies, or
    if `value` decreases somewhere, the result is any n strictly between `low` and `high`."""
    below, above = low, high
    while below + 1 < above:
        middle = (below + above) // 2
        if value(middle) <= 0:
            below = middle
        else:
            above = middle
    return min(max(below, low + 1), high - 1)
