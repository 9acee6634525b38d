"""Where a long graph is cut into segments whose replay ends at what is stored.

A graph recomputes each value once, as soon as backward asks for one that needs it, and holds it until its last reader
is through. Without limits, the first such question could have the whole forward recomputed and held at once, at more
than plain training's peak. So what lives across a boundary is always stored, and one segment at most is recomputed at a
time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from adacc_hf.artifacts.profile import KindProfile

NUM_SIZES = 24
"""Sizes of the largest segment that are tried."""


@dataclass(frozen=True)
class Segments:
    """How a graph is cut."""

    of_value: tuple[int, ...]
    """For each value the number of the segment that makes it, counted from the start of forward."""
    boundary: frozenset[int]
    """Values that live across a boundary."""

    @property
    def count(self) -> int:
        return max(self.of_value, default=0) + 1


def cut_into_segments(kind: KindProfile, value_bytes: Sequence[int]) -> Segments:
    """The boundaries for which their bytes, with those of the largest segment between two, are least.

    `value_bytes` are what recomputing each value takes while its segment is recomputed.
    """
    made_at = _making_positions(kind)
    live = _live_across(kind, made_at)
    live_bytes = [sum(kind.values[value].nbytes for value in values) for values in live]
    positions = _local_minima(live_bytes)
    made_bytes = [0] * (len(live) + 1)
    for value, position in enumerate(made_at):
        made_bytes[position] += value_bytes[value]
    before = [0]
    for nbytes in made_bytes:
        before.append(before[-1] + nbytes)
    total = before[-1]
    best: tuple[int, tuple[int, ...]] = (total, ())
    for step in range(1, NUM_SIZES + 1):
        # Geometric: from half the graph down to a few operators.
        limit = total * 0.75 ** (2 * step)
        found = _cheapest(positions, live_bytes, before, limit)
        if found is not None:
            largest = _largest_segment(found, before)
            best = min(best, (largest + sum(live_bytes[p] for p in found), found))
    boundaries = list(best[1])
    return Segments(
        of_value=tuple(bisect_left(boundaries, position) for position in made_at),
        boundary=frozenset(value for p in boundaries for value in live[p]),
    )


def _making_positions(kind: KindProfile) -> list[int]:
    """For each value the operator that makes it; what is given is there from the start."""
    return [0 if value.producer is None else value.producer for value in kind.values]


def _live_across(kind: KindProfile, made_at: Sequence[int]) -> list[list[int]]:
    """For each operator the values that live when it has run, and that forward reads later.

    What comes of parameters alone can be recomputed at any place.
    """
    last_read = list(made_at)
    for operator in kind.operators:
        for value in operator.inputs:
            last_read[value] = max(last_read[value], operator.index)
    live: list[list[int]] = [[] for _ in kind.operators]
    for record in kind.values:
        if record.role != "parameter":
            for position in range(made_at[record.index], last_read[record.index]):
                live[position].append(record.index)
    return live


def _local_minima(live_bytes: Sequence[int]) -> list[int]:
    """Operators after which no more bytes live than after their neighbours; the last of equal ones."""
    last = len(live_bytes) - 1
    return [
        position
        for position in range(last)
        if live_bytes[position] < live_bytes[position + 1]
        and (position == 0 or live_bytes[position] <= live_bytes[position - 1])
    ]


def _cheapest(
    positions: Sequence[int], live_bytes: Sequence[int], before: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """The boundaries with least bytes among those that leave no segment above `limit`; None if there are none."""
    last = len(before) - 1
    # Least cost of a chain of boundaries that ends at each position, and the one before it in that chain.
    cost: list[float] = []
    previous: list[int] = []
    for index, position in enumerate(positions):
        starts = [(0.0, -1)] if before[position + 1] <= limit else []
        for earlier in range(index - 1, -1, -1):
            if before[position + 1] - before[positions[earlier] + 1] > limit:
                break
            starts.append((cost[earlier], earlier))
        least, source = min(starts, default=(float("inf"), -1))
        cost.append(least + live_bytes[position])
        previous.append(source)
    ends = [(cost[index], index) for index, p in enumerate(positions) if before[last] - before[p + 1] <= limit]
    least, index = min(ends, default=(float("inf"), -1))
    if least == float("inf"):
        return None
    chain = []
    while index >= 0:
        chain.append(positions[index])
        index = previous[index]
    return tuple(reversed(chain))


def _largest_segment(boundaries: Sequence[int], before: Sequence[int]) -> int:
    edges = [0, *(position + 1 for position in boundaries), len(before) - 1]
    return max(before[end] - before[start] for start, end in pairwise(edges))
