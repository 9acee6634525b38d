"""Frontier of a kind of block: the plans on the lower convex hull of stored bytes and time.

A plan assigns an action to each activation of a block. The plans on a frontier are called frontier plans. They are in
order: the first one retains everything, and is the fastest. Each further one stores fewer bytes and takes more time. A
mixture of frontier plans gives each block of a kind one of these plans.

If memory has a price of w ms per byte, the best plan of a block minimises ms + w * bytes. Over all w, the best plans
are the corners of the lower convex hull of (bytes, ms).

At a fixed price, an integer program finds the best plan. The program is a closure problem, so its linear relaxation
usually has an integer solution. Only the constraints on values that must not be recomputed from lossily stored values
can make the solution fractional, and then the integer program itself is solved. Therefore a corner usually takes one
run of the simplex method. The run starts from the final basis of the run for the previous corner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from adacc_hf.solve.linear_program import TOLERANCE, LinearProgram, Solver
from adacc_hf.solve.milp import BlockVariables, KindModel, PricedPlan, retain_all

SLOPE_TOLERANCE = 1e-6
"""Minimum distance of a corner of the hull below the line between its two neighbours, as a fraction of the difference
in ms between these neighbours. The fraction is far above HiGHS's optimality tolerance."""
INTEGRALITY = 1e-4
"""Maximum distance from an integer at which a variable counts as integer. The maximum is far above HiGHS's
tolerance."""
SCALE = 1e3
"""Upper limit of an objective's costs after scaling. The scale matters because HiGHS's tolerances are absolute."""
TIE_BREAK = 1e-6
"""Weight of the stored bytes relative to the time in an objective. This small term decides between equally fast
plans."""


class BlockProgram:
    """Integer program that chooses the plan of one block, solved for different prices or limits of memory."""

    def __init__(self, model: KindModel) -> None:
        program = LinearProgram()
        self._program = program
        self._block = BlockVariables(program, model)
        self._plain = retain_all(model)
        self._total_ms = model.total_ms or 1.0
        self._total_bytes = self._plain.nbytes or 1
        self._limit = program.constrain(self._block.terms_bytes(1 / self._total_bytes))

    def frontier(self) -> list[PricedPlan]:
        """Return the plans on the lower convex hull, in order of falling stored bytes. The first plan retains
        everything.

        Each plan is slower than the previous plan. Tensors that several blocks share cost no bytes here.
        """
        if not self._plain.plan.choices:
            return [self._plain]
        least = self._least_bytes()
        if least.nbytes >= self._plain.nbytes:
            return [self._plain]
        return [self._plain, *self._corners(self._plain, least), least]

    def fastest_within(self, nbytes: int) -> PricedPlan:
        """Return the fastest plan that stores at most `nbytes`, which must not be below the least possible bytes."""
        if not self._plain.plan.choices:  # HiGHS has no status for a program without variables
            return self._plain
        weight = SCALE / self._total_ms
        costs = [*self._block.terms_ms(weight), *self._block.terms_bytes(SCALE * TIE_BREAK / self._total_bytes)]
        return self._solve(costs, (nbytes + 0.5) / self._total_bytes)  # half a byte absorbs rounding errors

    def _corners(self, larger: PricedPlan, smaller: PricedPlan) -> list[PricedPlan]:
        """Return the corners of the hull between `larger` and `smaller`, in the order of falling bytes. `larger` is the
        plan that stores more bytes, and `smaller` the plan that stores fewer. Both are left out of the result."""
        if smaller.ms <= larger.ms:
            return []
        price = (smaller.ms - larger.ms) / (larger.nbytes - smaller.nbytes)
        weight = SCALE / (self._total_ms + price * self._total_bytes)
        corner = self._solve([*self._block.terms_ms(weight), *self._block.terms_bytes(weight * price)])
        line_ms = larger.ms + price * (larger.nbytes - corner.nbytes)
        limit_ms = line_ms - SLOPE_TOLERANCE * (smaller.ms - larger.ms)
        if not smaller.nbytes < corner.nbytes < larger.nbytes or corner.ms >= limit_ms:
            return []
        return [*self._corners(larger, corner), corner, *self._corners(corner, smaller)]

    def _least_bytes(self) -> PricedPlan:
        """Return the plan that stores the fewest bytes. If several plans do, return the fastest of these."""
        least = self._solve(self._block.terms_bytes(SCALE / self._total_bytes))
        # Values of an integer solution are integers only within a tolerance, so the limit needs the same slack.
        limit = least.nbytes / self._total_bytes + TOLERANCE
        fastest = self._solve(self._block.terms_ms(SCALE / self._total_ms), limit)
        return min(least, fastest, key=lambda plan: (plan.nbytes, plan.ms))

    def _solve(self, costs: list[tuple[int, float]], limit: float = math.inf) -> PricedPlan:
        solution = self._solution(self._relaxation, costs, limit)
        if any(INTEGRALITY < value % 1 < 1 - INTEGRALITY for value in solution):
            solution = self._solution(self._integer, costs, limit)
        return self._block.priced_plan(solution)

    @cached_property
    def _relaxation(self) -> Solver:
        return Solver(self._program, integer=False)

    @cached_property
    def _integer(self) -> Solver:
        """Solver of the integer program, used if the solution of the linear relaxation is fractional."""
        return Solver(self._program, integer=True)

    def _solution(self, solver: Solver, costs: list[tuple[int, float]], limit: float) -> Sequence[float]:
        solver.bound(self._limit, high=limit)
        solution = solver.minimize(costs)
        solver.bound(self._limit)
        assert solution is not None, "the program has no solution, though RETAIN for all activations is one"
        return solution
