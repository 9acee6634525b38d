"""A linear or integer program in PuLP, solved by HiGHS inside this process.

PuLP hands the program over once. A program that then differs in its costs or in one bound is solved from the last
basis: a block's relaxation takes 0.1 ms, where building it takes 1.7 ms.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulp

MAX_NODES = 200
"""Branches that one integer program may take. GPT-2's take below ten; a limit on time alone would make the policy
depend on the machine's load."""
TOLERANCE = 1e-9
"""By how much a solution may miss a constraint. HiGHS's own 1e-6 would let stored bytes exceed the budget by
kilobytes."""

Terms = Iterable[tuple[int, float]]
"""Pairs of a variable and its coefficient; a variable may occur more than once."""


class LinearProgram:
    """Variables from 0 to a bound of their own, and rows that bound sums of them; both are known by their number."""

    def __init__(self) -> None:
        _import_pulp()
        import pulp

        self.problem = pulp.LpProblem("adacc", pulp.LpMinimize)
        self.variables: list[pulp.LpVariable] = []
        self.rows: list[pulp.LpConstraint] = []

    def variable(self, upper: float = 1.0) -> int:
        """A new variable, whole in an integer program, between 0 and `upper`."""
        import pulp

        name = f"x{len(self.variables):06d}"
        self.variables.append(self.problem.add_variable(name, 0.0, upper, pulp.LpInteger))
        return len(self.variables) - 1

    def constrain(self, terms: Terms, low: float = -math.inf, high: float = math.inf) -> int:
        """A new row: the sum of `terms` is at least `low`, or at most `high`, or both where these are equal."""
        import pulp

        total = combine(terms)
        if low == -math.inf:
            # PuLP takes no infinite bound: without one, the most that the sum can be.
            most = sum(max(0.0, coefficient) * self.variables[x].upBound for x, coefficient in total.items())
            sense, bound = pulp.LpConstraintLE, min(high, most)
        elif high == math.inf:
            sense, bound = pulp.LpConstraintGE, low
        else:
            assert low == high, f"PuLP's rows have one bound, or two equal ones: not {low} and {high}"
            sense, bound = pulp.LpConstraintEQ, low
        expression = pulp.LpAffineExpression({self.variables[x]: coefficient for x, coefficient in total.items()})
        self.rows.append(pulp.LpConstraint(expression, sense, rhs=bound))
        self.problem.addConstraint(self.rows[-1])
        return len(self.rows) - 1


def _import_pulp() -> None:
    """Import PuLP from a stack of its own.

    It keeps the errors of solvers that it does not find, and these keep the frames that it was imported from: whoever
    asks for a first policy would never see their model's memory again.
    """
    if "pulp" not in sys.modules:
        thread = Thread(target=import_module, args=("pulp",))
        thread.start()
        thread.join()


def combine(terms: Terms) -> dict[int, float]:
    """The coefficient of each variable in the sum of `terms`."""
    total: dict[int, float] = defaultdict(float)
    for variable, coefficient in terms:
        total[variable] += coefficient
    return dict(total)


@dataclass
class SolverLog:
    """The limits of a search, and what its runs of HiGHS came to."""

    gap: float = 0.0
    """Part of the objective by which an integer solution may lie above the best bound; 0 asks for a proof."""
    seconds: float = 60.0
    """Limit of each run of an integer program; a relaxation takes no search."""
    num_solves: int = 0
    num_unproven: int = 0
    """Runs that ended at a limit."""
    worst_gap: float = 0.0
    """Largest gap that any integer program was left with."""


class Solver:
    """One program inside HiGHS; `minimize` may be called again after a change of costs or bounds."""

    def __init__(self, program: LinearProgram, log: SolverLog, *, integer: bool) -> None:
        import numpy
        import pulp

        self._log = log
        self._integer = integer
        problem = program.problem
        # Zeros, so that PuLP sees the variables that stand in no row.
        problem.setObjective(pulp.LpAffineExpression(dict.fromkeys(program.variables, 0.0)))
        highs = pulp.HiGHS(
            mip=integer,
            msg=False,
            gapAbs=0.0,
            gapRel=log.gap,
            threads=1,
            primal_feasibility_tolerance=TOLERANCE,
            dual_feasibility_tolerance=TOLERANCE,
            mip_feasibility_tolerance=TOLERANCE,
            mip_max_nodes=MAX_NODES,
            # A relaxation starts from the last basis, which presolve would throw away.
            presolve="on" if integer else "off",
        )
        # The parts of PuLP's solve(), which would build the program again for every run.
        highs.createAndConfigureSolver(problem)
        highs.buildSolverModel(problem)
        self._highs = problem.solverModel
        self._columns = numpy.array([variable.index for variable in program.variables], dtype=numpy.int32)
        self._rows = [row.index for row in program.rows]

    def bound(self, row: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Replace the bounds of `row`."""
        self._highs.changeRowBounds(self._rows[row], low, high)

    def minimize(self, costs: Terms, limit: float = math.inf) -> Sequence[float] | None:
        """The value of each variable where the sum of `costs` is least; None if no solution below `limit` was found."""
        import highspy
        import numpy

        dense = numpy.zeros(len(self._columns))
        for variable, cost in costs:
            dense[variable] += cost
        self._highs.changeColsCost(len(self._columns), self._columns, dense)
        if self._integer:
            # HiGHS counts the time of all its runs.
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + self._log.seconds)
            # Branches that cannot come below the limit are cut off.
            self._highs.setOptionValue("objective_bound", limit)
        self._highs.run()
        self._log.num_solves += 1
        # Not PuLP's status, which calls what a limit of time cut short optimal.
        status, information = self._highs.getModelStatus(), self._highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return None
        is_proven = status == highspy.HighsModelStatus.kOptimal
        self._log.num_unproven += not is_proven
        found = information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if information.objective_function_value >= limit:
            # What was found on the way to a proof that nothing is below.
            return None
        if self._integer:
            self._log.worst_gap = max(self._log.worst_gap, information.mip_gap)
        return numpy.array(self._highs.getSolution().col_value)[self._columns].tolist() if found else None
