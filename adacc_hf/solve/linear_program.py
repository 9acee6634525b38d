"""Linear and integer programs, built with PuLP and solved by HiGHS inside this process.

PuLP builds the HiGHS model once. If only costs or one bound change, HiGHS starts again from the previous run's basis.
For one block, solving the linear relaxation again takes 0.1 ms, and building the model takes 1.7 ms.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulp

MAX_NODES = 200
"""Maximum number of branch-and-bound nodes of an integer program. GPT-2's programs take fewer than ten. A time limit
alone would make the policy depend on the machine's load."""
SOLVER_SECONDS = 60.0
"""Time limit of one integer program, which usually takes 10 to 30 ms. Linear relaxations have no time limit. Only on a
very slow machine does a program end at the limit. In `Policy.facts`, "status" is then "feasible", not "optimal"."""
TOLERANCE = 1e-9
"""Feasibility tolerance. With HiGHS's default of 1e-6, stored bytes could exceed the budget by kilobytes."""

Terms = Iterable[tuple[int, float]]
"""Pairs of a variable's number and a coefficient. A variable may occur more than once."""


class LinearProgram:
    """Linear program: non-negative variables, and rows that limit weighted sums of variables.

    Variables and rows are identified by numbers.
    """

    def __init__(self) -> None:
        _import_pulp()
        import pulp

        self.problem = pulp.LpProblem("adacc", pulp.LpMinimize)
        self.variables: list[pulp.LpVariable] = []
        self.rows: list[pulp.LpConstraint] = []

    def variable(self, upper: float = 1.0) -> int:
        """Add a variable between 0 and `upper`, and return its number.

        If the program is solved as an integer program, the variable only takes integer values.
        """
        import pulp

        name = f"x{len(self.variables):06d}"
        self.variables.append(self.problem.add_variable(name, 0.0, upper, pulp.LpInteger))
        return len(self.variables) - 1

    def constrain(self, terms: Terms, low: float = -math.inf, high: float = math.inf) -> int:
        """Add a row that keeps the sum of `terms` above `low` or below `high`. Return the row's number."""
        import pulp

        total: dict[int, float] = defaultdict(float)
        for variable, coefficient in terms:
            total[variable] += coefficient
        if low == -math.inf:
            # PuLP accepts no infinite bound, so use the maximum of the sum instead.
            maximum = sum(max(0.0, coefficient) * self.variables[x].upBound for x, coefficient in total.items())
            sense, bound = pulp.LpConstraintLE, min(high, maximum)
        else:
            assert high == math.inf, f"a PuLP row has one bound, not {low} and {high}"
            sense, bound = pulp.LpConstraintGE, low
        expression = pulp.LpAffineExpression({self.variables[x]: coefficient for x, coefficient in total.items()})
        self.rows.append(pulp.LpConstraint(expression, sense, rhs=bound))
        self.problem.addConstraint(self.rows[-1])
        return len(self.rows) - 1


def _import_pulp() -> None:
    """Import PuLP in a separate thread, because PuLP keeps the stack frames of the importing code alive. PuLP stores
    the exceptions of solvers that are not installed, and their tracebacks refer to the importing frames. An import in
    the caller's thread would keep the caller's local variables, such as the model, alive forever."""
    if "pulp" not in sys.modules:
        thread = Thread(target=import_module, args=("pulp",))
        thread.start()
        thread.join()


@cache
def silence_highs() -> None:
    """Construct the process's first HiGHS model without output.

    HiGHS 1.16 then writes its version to stdout, before an option can prevent it.
    """
    import highspy

    try:
        sys.stdout.flush()
        stdout_copy = os.dup(1)
    except (AttributeError, OSError, ValueError):  # stdout is closed, so that nothing can be written to it
        return
    try:
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 1)
        highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # the line may still be in the buffer of the C library
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


class Solver:
    """HiGHS model of a linear or integer program. `minimize` can be called repeatedly, with changed costs or bounds."""

    def __init__(self, program: LinearProgram, *, integer: bool) -> None:
        import numpy
        import pulp

        self._integer = integer
        silence_highs()
        problem = program.problem
        # Costs of 0 make PuLP include the variables that are in no row.
        problem.setObjective(pulp.LpAffineExpression(dict.fromkeys(program.variables, 0.0)))
        highs = pulp.HiGHS(
            mip=integer,
            msg=False,
            gapAbs=0.0,
            gapRel=0.0,
            threads=1,
            primal_feasibility_tolerance=TOLERANCE,
            dual_feasibility_tolerance=TOLERANCE,
            mip_feasibility_tolerance=TOLERANCE,
            mip_max_nodes=MAX_NODES,
            # A relaxation starts from the last basis, which presolve would discard.
            presolve="on" if integer else "off",
        )
        # The steps of PuLP's solve() one by one, because solve() would build the model again for every run.
        highs.createAndConfigureSolver(problem)
        highs.buildSolverModel(problem)
        self._highs = problem.solverModel
        self._columns = numpy.array([variable.index for variable in program.variables], dtype=numpy.int32)
        self._rows = [row.index for row in program.rows]

    def bound(self, row: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Replace the bounds of row number `row`: the row's weighted sum must be between `low` and `high`."""
        self._highs.changeRowBounds(self._rows[row], low, high)

    def minimize(self, costs: Terms) -> Sequence[float] | None:
        """Return the values of all variables that minimise `costs`, or None if no solution is found."""
        import numpy

        dense = numpy.zeros(len(self._columns))
        for variable, cost in costs:
            dense[variable] += cost
        self._highs.changeColsCost(len(self._columns), self._columns, dense)
        if self._integer:
            # HiGHS's run time accumulates over all its runs.
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + SOLVER_SECONDS)
        self._highs.run()
        if not self._is_solved():
            self._highs.clearSolver()  # from the last basis, HiGHS may stall on rounding errors
            self._highs.run()
        if not self._is_solved():
            return None
        return numpy.array(self._highs.getSolution().col_value)[self._columns].tolist()

    def _is_solved(self) -> bool:
        """Return True if the last run has solved a relaxation to the optimum, or has found an integer solution."""
        from highspy import HighsModelStatus, SolutionStatus

        # PuLP's own status would say "optimal" for a run that ended at the time limit.
        status, point = self._highs.getModelStatus(), self._highs.getInfo().primal_solution_status
        if not self._integer:
            return bool(status == HighsModelStatus.kOptimal)
        is_infeasible = status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible)
        return bool(point == SolutionStatus.kSolutionStatusFeasible) and not is_infeasible
