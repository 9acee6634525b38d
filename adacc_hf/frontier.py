"""The plans worth mixing: for each kind, those that are cheapest at some price of memory, from RETAIN everything on.

At a price of w ms per byte the best plan minimises ms + w * bytes; over all w these plans are the corners of the lower
convex hull of (bytes, ms). At a fixed price the program's linear relaxation is integral (it is a closure problem), so
CBC solves it without branching, and one call takes many prices and all kinds at once: starting CBC costs more than
solving.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

from adacc_hf.milp import BlockVariables, Cbc, Column, KindModel, combine, retain_all, total_ms

MAX_ROUNDS = 6
"""Calls of CBC that look for corners; each can split every gap once. GPT-2 has 10 to 12 corners, found in 4 rounds."""
TOLERANCE = 1e-6
"""How far below the line between its neighbours a corner must lie, as a part of their difference; ten times what CBC
may leave of an optimum."""


def frontiers(cbc: Cbc, models: Sequence[KindModel]) -> list[list[Column]]:
    """For each kind the plans worth mixing, from all RETAIN to the least bytes: bytes falling, ms rising.

    They do not depend on the budget, which makes the policies for two budgets comparable. Shared tensors count as free.
    """
    found = [[retain_all(model)] for model in models]
    for columns, floor in zip(found, _least_bytes(cbc, models), strict=True):
        if floor.nbytes < columns[0].nbytes:
            columns.append(floor)
    gaps = [(i, pair) for i, columns in enumerate(found) for pair in pairwise(columns)]
    for _ in range(MAX_ROUNDS):
        gaps = [(i, pair) for i, pair in gaps if pair[1].ms > pair[0].ms]
        if not gaps:
            break
        corners = _cheapest(cbc, [(models[i], _slope(*pair)) for i, pair in gaps])
        split = [(i, pair, corner) for (i, pair), corner in zip(gaps, corners, strict=True) if _is_below(corner, *pair)]
        for i, _, corner in split:
            insort(found[i], corner, key=lambda column: -column.nbytes)
        gaps = [(i, gap) for i, (left, right), corner in split for gap in ((left, corner), (corner, right))]
    return found


def chain(kinds: Sequence[int], columns: Sequence[Sequence[Column]]) -> Iterator[list[Column]]:
    """Policies from all RETAIN to the least bytes, a column per block; each makes one more block store less.

    `kinds[i]` is the kind of block i and `columns[k]` the frontier of kind k. The step that costs least per byte comes
    first, so every policy is the fastest of all that store as little. The first blocks are changed first: their
    backward comes last, when the least else is stored.
    """
    policy = [columns[kind][0] for kind in kinds]
    yield list(policy)
    steps = [
        (_slope(left, right), kind, number, right)
        for kind, frontier in enumerate(columns)
        for number, (left, right) in enumerate(pairwise(frontier))
    ]
    for _, kind, _, column in sorted(steps, key=lambda step: step[:3]):
        for block in range(len(kinds)):
            if kinds[block] == kind:
                policy[block] = column
                yield list(policy)


def _slope(left: Column, right: Column) -> float:
    """The price of memory, in ms per byte, at which two plans cost the same."""
    return (right.ms - left.ms) / (left.nbytes - right.nbytes)


def _is_below(corner: Column, left: Column, right: Column) -> bool:
    """Whether `corner` is better than every mixture of its neighbours, and between them."""
    line_ms = left.ms + _slope(left, right) * (left.nbytes - corner.nbytes)
    return right.nbytes < corner.nbytes < left.nbytes and corner.ms < line_ms - TOLERANCE * (right.ms - left.ms)


def _least_bytes(cbc: Cbc, models: Sequence[KindModel]) -> list[Column]:
    """The plan that stores least for each kind, and among those nearly the cheapest."""
    priced = [(model, (total_ms([model]) or 1.0) / TOLERANCE / (retain_all(model).nbytes or 1)) for model in models]
    return _cheapest(cbc, priced)


def _cheapest(cbc: Cbc, priced: Sequence[tuple[KindModel, float]]) -> list[Column]:
    """For each kind and price of memory, in ms per byte, the plan with the least ms + price * bytes."""
    from pulp import LpMinimize, LpProblem

    problem = LpProblem("corners", LpMinimize)
    blocks = [BlockVariables(problem, model, f"b{i}_") for i, (model, _) in enumerate(priced)]
    objective = []
    for block, (model, price) in zip(blocks, priced, strict=True):
        # Each block's share of the objective is scaled to about 1, the size that CBC's tolerances are made for.
        scale = 1.0 / (total_ms([model]) + price * (retain_all(model).nbytes or 1))
        objective += [(x, ms * scale) for x, ms in block.terms_ms()]
        objective += [(x, nbytes * price * scale) for x, nbytes in block.terms_bytes()]
    problem += combine(objective)
    cbc.solve(problem)
    return [block.column() for block in blocks]
