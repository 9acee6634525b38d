"""The plans worth mixing: for each kind, those that are cheapest at some price of memory, from RETAIN everything on.

At a price of w ms per byte the best plan minimises ms + w * bytes; over all w these plans are the corners of the lower
convex hull of (bytes, ms). At a fixed price the program's linear relaxation is integral but for what no replay may make
beside what is stored with loss (the rest is a closure problem), so a corner is one run of the simplex method from the
last corner's basis as a rule, and an integer program where that ends between plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from adacc_hf.solving.milp import BlockVariables, Column, KindModel, retain_all
from adacc_hf.solving.program import Program, Solver, SolverLog

TOLERANCE = 1e-6
"""How far below the line between its neighbours a corner must lie, as a part of their difference; far above what HiGHS
may leave of an optimum."""
INTEGRALITY = 1e-4
"""How far from an integer a variable may be: far above what HiGHS allows itself, and far below a half."""
SCALE = 1e3
"""What the costs of one run add up to at most: its tolerance of 1e-9 is absolute."""


def frontiers(log: SolverLog, models: Sequence[KindModel]) -> list[list[Column]]:
    """For each kind the plans worth mixing, from all RETAIN to the least bytes: bytes falling, ms rising.

    They do not depend on the budget, which makes the policies for two budgets comparable. Shared tensors count as free.
    """
    return [_frontier(log, model) for model in models]


def _frontier(log: SolverLog, model: KindModel) -> list[Column]:
    plain = retain_all(model)
    if not plain.plan.choices:  # HiGHS has no status for a program without variables
        return [plain]
    program = _PricedMemory(log, model)
    least = program.least_bytes()
    if least.nbytes >= plain.nbytes:
        return [plain]
    return [plain, *_corners(program, plain, least), least]


def _corners(program: _PricedMemory, left: Column, right: Column) -> list[Column]:
    """The corners strictly between two plans of the hull, bytes falling."""
    if right.ms <= left.ms:
        return []
    corner = program.cheapest(_slope(left, right))
    if not _is_below(corner, left, right):
        return []
    return [*_corners(program, left, corner), corner, *_corners(program, corner, right)]


class _PricedMemory:
    """One block's program at any price of memory."""

    def __init__(self, log: SolverLog, model: KindModel) -> None:
        program = Program()
        self.log = log
        self.program = program
        self.block = BlockVariables(program, model)
        self.whole_ms = model.total_ms or 1.0
        self.whole_bytes = retain_all(model).nbytes or 1
        self.limit = program.constrain(self.block.terms_bytes(1 / self.whole_bytes))
        self.relaxation = Solver(program, log, integer=False)

    def cheapest(self, price: float) -> Column:
        """The plan with the least ms + price * bytes."""
        weight = SCALE / (self.whole_ms + price * self.whole_bytes)
        return self._solved([*self.block.terms_ms(weight), *self.block.terms_bytes(weight * price)])

    def least_bytes(self) -> Column:
        """The plan that stores least, and of those the fastest."""
        column = self._solved(self.block.terms_bytes(SCALE / self.whole_bytes))
        fastest = self._solved(self.block.terms_ms(SCALE / self.whole_ms), column.nbytes / self.whole_bytes)
        return min(column, fastest, key=lambda c: (c.nbytes, c.ms))

    def _solved(self, costs: list[tuple[int, float]], limit: float = math.inf) -> Column:
        solution = self._solution(self.relaxation, costs, limit)
        if any(INTEGRALITY < value < 1 - INTEGRALITY for value in solution):
            solution = self._solution(self.integer, costs, limit)
        return self.block.column(solution)

    @cached_property
    def integer(self) -> Solver:
        return Solver(self.program, self.log, integer=True)

    def _solution(self, solver: Solver, costs: list[tuple[int, float]], limit: float) -> Sequence[float]:
        solver.bound(self.limit, high=limit)
        solution = solver.minimize(costs)
        solver.bound(self.limit)
        assert solution is not None, "all RETAIN is always a solution"
        return solution


def least_ms(num_blocks: Sequence[int], columns: Sequence[Sequence[Column]], limit_bytes: int) -> float:
    """The time that no policy can beat which stores at most `limit_bytes`, shared tensors left out; infinity if none
    can store so little.

    `num_blocks[k]` blocks have frontier `columns[k]`. Steps along the frontiers are taken by falling gain, the last one
    in part: a policy of whole steps cannot do better, nor one of plans above the hull.
    """
    excess = sum(n * frontier[0].nbytes for n, frontier in zip(num_blocks, columns, strict=True)) - limit_bytes
    ms = 0.0
    for price, kind, _, right, left in sorted(_steps(columns), key=lambda step: step[:3]):
        freed = min(max(0, excess), num_blocks[kind] * (left.nbytes - right.nbytes))
        ms += freed * price
        excess -= freed
    slack = sum(n * TOLERANCE * frontier[-1].ms for n, frontier in zip(num_blocks, columns, strict=True))
    return math.inf if excess > 0 else max(0.0, ms - slack)


def _steps(columns: Sequence[Sequence[Column]]) -> Iterator[tuple[float, int, int, Column, Column]]:
    """(price, kind, number along the frontier, plan after, plan before) of every step along the frontiers."""
    for kind, frontier in enumerate(columns):
        for number, (left, right) in enumerate(pairwise(frontier)):
            yield _slope(left, right), kind, number, right, left


def chain(kinds: Sequence[int], columns: Sequence[Sequence[Column]]) -> Iterator[list[Column]]:
    """Policies from all RETAIN to the least bytes, a column per block; each makes one more block store less.

    `kinds[i]` is the kind of block i and `columns[k]` the frontier of kind k. The step that costs least per byte comes
    first, so every policy is the fastest of all that store as little. The first blocks are changed first: their
    backward comes last, when the least else is stored.
    """
    policy = [columns[kind][0] for kind in kinds]
    yield list(policy)
    for _, kind, _, column, _ in sorted(_steps(columns), key=lambda step: step[:3]):
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
