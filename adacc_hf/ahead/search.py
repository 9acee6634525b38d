"""The largest whole number at which something still fits, in as few looks as a smooth cost allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

NEAREST = 3
"""Points that the next look is guessed from: in a sequence's length, memory is a polynomial of degree 2 at most."""
STALLS = 3
"""Guesses in a row that may leave more than half of what is open; after those the middle is looked at."""

FARTHEST = 32
"""How many times the largest known to fit the next look may be, lest a rough guess goes far off."""


def largest(excess: Callable[[int], int], start: int, limit: int, hints: Mapping[int, int]) -> int:
    """The largest n from 1 to `limit` with excess(n) <= 0; 0 if there is none.

    `excess` must not fall. Both the answer and, but for `limit`, the number after it are looked at. Where those may be
    is guessed from the nearest points: those looked at, `start` the first, and `hints`; the one at 0 may be rough.
    """
    points = dict(hints)
    low, high, stalls = 0, limit + 1, 0
    guess = min(max(start, 1), limit)
    while low + 1 < high:
        open_before = high - low
        points[guess] = excess(guess)
        if points[guess] <= 0:
            low = guess
        else:
            high = guess
        stalls = stalls + 1 if 2 * (high - low) > open_before else 0
        middle = (low + high) // 2
        end = min(high, FARTHEST * low) if low else high
        guess = middle if stalls > STALLS else _last_below(_through(points, low, high), low, end)
    return low


def _through(points: Mapping[int, int], low: int, high: int) -> Callable[[int], float]:
    """The polynomial through both sides of the answer and the points nearest to it (Newton's divided differences)."""
    exact = [n for n in points if n > 0]
    nodes = sorted(exact if len(exact) > 1 else points, key=lambda n: (n not in (low, high), abs(points[n]), n))
    nodes = nodes[:NEAREST]
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


def _last_below(value: Callable[[int], float], low: int, high: int) -> int:
    """The last n strictly between `low` and `high` with value(n) <= 0 if `value` does not fall; else one of them."""
    below, above = low, high
    while below + 1 < above:
        middle = (below + above) // 2
        if value(middle) <= 0:
            below = middle
        else:
            above = middle
    return min(max(below, low + 1), high - 1)
