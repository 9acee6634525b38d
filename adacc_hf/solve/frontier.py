"""The plans worth mixing, those of each kind that are cheapest at some price of memory, and their best mixture.

At a price of w ms per byte the best plan minimises ms + w * bytes; over all w these plans are the corners of the lower
convex hull of (bytes, ms). At a fixed price the program's linear relaxation is integral but for what no replay may make
beside what is stored with loss (the rest is a closure problem), so a corner is one run of the simplex method from the
last corner's basis as a rule, and an integer program where that ends between plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from adacc_hf.solve.linear_program import LinearProgram, Solver, SolverLog
from adacc_hf.solve.milp import BlockVariables, KindModel, PricedPlan, retain_all

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile

SLOPE_TOLERANCE = 1e-6
"""How far below the line between its neighbours a corner must lie, as a part of their difference; far above what HiGHS
may leave of an optimum."""
INTEGRALITY = 1e-4
"""How far from an integer a variable may be: far above what HiGHS allows itself, and far below a half."""
SCALE = 1e3
"""What the costs of one run, and an objective, add up to at most: HiGHS's tolerances are absolute."""


def frontiers(log: SolverLog, models: Sequence[KindModel]) -> list[list[PricedPlan]]:
    """For each kind the plans worth mixing, from all RETAIN to the least bytes: bytes falling, ms rising.

    They do not depend on the budget, which makes the policies for two budgets comparable. Shared tensors count as free.
    """
    return [_frontier(log, model) for model in models]


def _frontier(log: SolverLog, model: KindModel) -> list[PricedPlan]:
    plain = retain_all(model)
    if not plain.plan.choices:  # HiGHS has no status for a program without variables
        return [plain]
    program = _PricedMemory(log, model)
    least = program.least_bytes()
    if least.nbytes >= plain.nbytes:
        return [plain]
    return [plain, *_corners(program, plain, least), least]


def _corners(program: _PricedMemory, left: PricedPlan, right: PricedPlan) -> list[PricedPlan]:
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
        program = LinearProgram()
        self.log = log
        self.program = program
        self.block = BlockVariables(program, model)
        self.whole_ms = model.total_ms or 1.0
        self.whole_bytes = retain_all(model).nbytes or 1
        self.limit = program.constrain(self.block.terms_bytes(1 / self.whole_bytes))
        self.relaxation = Solver(program, log, integer=False)

    def cheapest(self, price: float) -> PricedPlan:
        """The plan with the least ms + price * bytes."""
        weight = SCALE / (self.whole_ms + price * self.whole_bytes)
        return self._solved([*self.block.terms_ms(weight), *self.block.terms_bytes(weight * price)])

    def least_bytes(self) -> PricedPlan:
        """The plan that stores least, and of those the fastest."""
        column = self._solved(self.block.terms_bytes(SCALE / self.whole_bytes))
        fastest = self._solved(self.block.terms_ms(SCALE / self.whole_ms), column.nbytes / self.whole_bytes)
        return min(column, fastest, key=lambda c: (c.nbytes, c.ms))

    def _solved(self, costs: list[tuple[int, float]], limit: float = math.inf) -> PricedPlan:
        solution = self._solution(self.relaxation, costs, limit)
        if not _is_integral(solution):
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


def _is_integral(solution: Sequence[float]) -> bool:
    return not any(INTEGRALITY < value % 1 < 1 - INTEGRALITY for value in solution)


def least_ms(num_blocks: Sequence[int], columns: Sequence[Sequence[PricedPlan]], limit_bytes: int) -> float:
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
    slack = sum(n * SLOPE_TOLERANCE * frontier[-1].ms for n, frontier in zip(num_blocks, columns, strict=True))
    return math.inf if excess > 0 else max(0.0, ms - slack)


def _steps(columns: Sequence[Sequence[PricedPlan]]) -> Iterator[tuple[float, int, int, PricedPlan, PricedPlan]]:
    """(price, kind, number along the frontier, plan after, plan before) of every step along the frontiers."""
    for kind, frontier in enumerate(columns):
        for number, (left, right) in enumerate(pairwise(frontier)):
            yield _slope(left, right), kind, number, right, left


def chain(kinds: Sequence[int], columns: Sequence[Sequence[PricedPlan]]) -> Iterator[list[PricedPlan]]:
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


def _slope(left: PricedPlan, right: PricedPlan) -> float:
    """The price of memory, in ms per byte, at which two plans cost the same."""
    return (right.ms - left.ms) / (left.nbytes - right.nbytes)


def _is_below(corner: PricedPlan, left: PricedPlan, right: PricedPlan) -> bool:
    """Whether `corner` is better than every mixture of its neighbours, and between them."""
    line_ms = left.ms + _slope(left, right) * (left.nbytes - corner.nbytes)
    return right.nbytes < corner.nbytes < left.nbytes and corner.ms < line_ms - SLOPE_TOLERANCE * (right.ms - left.ms)


# Which plan each block gets, as one program over all kinds: the least time for a given amount of stored bytes.
#
# Blocks of one kind may act differently, which costs less than one plan for all: most take plans of their kind's
# frontier, and a few of each kind, the free ones, share a plan of any shape, which uses up what the others leave.

TIE_BREAK = 1e-6
"""Weight of all stored bytes beside all ms in the objective: decides between plans that are equally fast."""
CORRECTIONS = 3
"""Runs that lower a cap again when a rounded solution misses it, as it may by a few bytes in a hundred GiB."""


def fixed_bytes(profile: Profile) -> int:
    """What is stored whatever the policy: the outside of the blocks, and shared tensors that autograd saves."""
    return profile.outside_stored_bytes + sum(shared.nbytes for shared in profile.shared if shared.saved)


def stored_bytes(profile: Profile, columns: Sequence[PricedPlan]) -> int:
    """What forward leaves behind when the i-th block runs under `columns[i]`; shared tensors count once."""
    read = frozenset().union(*(column.shared for column in columns))
    shared = sum(profile.shared[i].nbytes for i in read if not profile.shared[i].saved)
    return fixed_bytes(profile) + shared + sum(column.nbytes for column in columns)


def overhead_ms(columns: Sequence[PricedPlan]) -> float:
    """What the policy costs per step."""
    return math.fsum(column.ms for column in columns)


class MixtureProgram:
    """The program whose solution gives `num_free[k]` blocks of kind k one plan of any shape and the others columns.

    Variables besides those of `BlockVariables`:
      count[k, c]  blocks of kind k that run under column c of its frontier (integer)
      reads[s]     some replay reads shared tensor s, which autograd does not save (binary)
    """

    def __init__(
        self,
        profile: Profile,
        models: Sequence[KindModel],
        frontiers: Sequence[Sequence[PricedPlan]],
        num_free: Sequence[int],
        log: SolverLog,
    ) -> None:
        self.profile = profile
        self.models = models
        self.frontiers = frontiers
        blocks = Counter(block.kind for block in profile.blocks)
        self.num_free = num_free
        self.rest = [blocks[k] - free for k, free in enumerate(num_free)]
        program = LinearProgram()
        self.free = {k: BlockVariables(program, model) for k, model in enumerate(models) if num_free[k]}
        self.counts = {
            (k, c): program.variable(self.rest[k])
            for k, columns in enumerate(frontiers)
            for c in range(len(columns))
            if self.rest[k]
        }
        self.reads = {i: program.variable() for i, shared in enumerate(profile.shared) if not shared.saved}
        self._constrain(program)
        # [Memory] what is stored keeps to a cap (equations 7 and 8), as a part of what plain training stores.
        self.unit = 1 / (profile.plain_stored_bytes or 1)
        self.whole_ms = sum(models[block.kind].total_ms for block in profile.blocks) or 1.0
        self.memory = program.constrain((x, self.unit * nbytes) for x, nbytes in self._terms_bytes())
        self.program, self.log = program, log
        self.solver = Solver(program, log, integer=True)

    def _constrain(self, program: LinearProgram) -> None:
        # [Blocks] every block has a plan.
        for k, rest in enumerate(self.rest):
            if rest:
                counts = [(count, 1.0) for (kind, _), count in self.counts.items() if kind == k]
                program.constrain(counts, low=rest, high=rest)
        # [Shared] a shared tensor that any replay reads is held, once.
        for block in self.free.values():
            for shared, run in block.shared_readers():
                if shared in self.reads:
                    program.constrain([(self.reads[shared], 1.0), (run, -1.0)], low=0.0)
        for (k, c), count in self.counts.items():
            for shared in self.frontiers[k][c].shared & self.reads.keys():
                program.constrain([(self.reads[shared], self.rest[k]), (count, -1.0)], low=0.0)

    def least_ms(self, cap_bytes: int, most_ms: float = math.inf) -> list[PricedPlan] | None:
        """A column per block, the fastest of those that store at most `cap_bytes` and take at most `most_ms`; None if
        none was found. A limit of time that is near what can be had shortens the search to a fraction."""
        room = cap_bytes - fixed_bytes(self.profile)
        costs = [*self._ms(SCALE), *self._bytes(SCALE * TIE_BREAK)]
        # Policies that take `most_ms` themselves are below this, whatever they store.
        limit = SCALE * (most_ms / self.whole_ms + 2 * TIE_BREAK * max(1.0, room * self.unit))
        for _ in range(CORRECTIONS):
            # Sizes are whole bytes, so that half of one keeps rounding away from both sides.
            self.solver.bound(self.memory, high=(room + 0.5) * self.unit)
            solution = self.solver.minimize(costs, limit)
            if solution is None:
                return None
            columns = self._columns(solution)
            excess = stored_bytes(self.profile, columns) - cap_bytes
            if excess <= 0:
                return columns
            room -= excess
        return None

    def least_bytes(self) -> list[PricedPlan]:
        """A column per block, storing as little as any, where all blocks are free.

        Without a cap the relaxation is integral as a rule, as for one block, and no limit of time can cut it short.
        """
        assert not any(self.rest), "blocks that take columns of a frontier make the relaxation fractional"
        costs = [*self._bytes(SCALE), *self._ms(SCALE * TIE_BREAK)]
        solution = self._uncapped(Solver(self.program, self.log, integer=False), costs)
        if not _is_integral(solution):
            solution = self._uncapped(self.solver, costs)
        return self._columns(solution)

    def _uncapped(self, solver: Solver, costs: list[tuple[int, float]]) -> Sequence[float]:
        solver.bound(self.memory)
        solution = solver.minimize(costs)
        assert solution is not None, "all RETAIN is always a solution"
        return solution

    def _ms(self, weight: float) -> list[tuple[int, float]]:
        """The terms of the objective for time, scaled to at most `weight`."""
        terms = [(x, self.num_free[k] * ms) for k, block in self.free.items() for x, ms in block.terms_ms()]
        terms += [(count, self.frontiers[k][c].ms) for (k, c), count in self.counts.items()]
        return [(x, weight * ms / self.whole_ms) for x, ms in terms]

    def _bytes(self, weight: float) -> list[tuple[int, float]]:
        """The terms of the objective for stored bytes, scaled to at most about `weight`."""
        return [(x, weight * self.unit * nbytes) for x, nbytes in self._terms_bytes()]

    def _terms_bytes(self) -> list[tuple[int, float]]:
        terms = [(x, self.num_free[k] * size) for k, block in self.free.items() for x, size in block.terms_bytes()]
        terms += [(count, self.frontiers[k][c].nbytes) for (k, c), count in self.counts.items()]
        return terms + [(read, self.profile.shared[i].nbytes) for i, read in self.reads.items()]

    def _columns(self, solution: Sequence[float]) -> list[PricedPlan]:
        """The solution as a column per block; among blocks of a kind the first store least."""
        pools = [[self.free[k].column(solution)] * free if free else [] for k, free in enumerate(self.num_free)]
        for (k, c), count in self.counts.items():
            pools[k] += [self.frontiers[k][c]] * round(solution[count])
        order = [iter(sorted(pool, key=lambda column: column.nbytes)) for pool in pools]
        return [next(order[block.kind]) for block in self.profile.blocks]
