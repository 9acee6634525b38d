"""A linear or integer program in plain numbers, and HiGHS to solve it.

HiGHS runs inside this process: a program that differs from the last one in its costs or in one bound is solved from
the last basis, in about 0.1 ms for a block's relaxation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import highspy

MAX_NODES = 200
"""Branches that one integer program may take. GPT-2's take below ten; a limit on time alone would make the policy
depend on the machine's load."""
TOLERANCE = 1e-9
"""By how much a solution may miss a constraint. HiGHS's own 1e-6 would let stored bytes exceed the budget by
kilobytes."""

Terms = Iterable[tuple[int, float]]
"""Pairs of a variable and its coefficient; a variable may occur more than once."""


@dataclass
class Program:
    """Variables from 0 to a bound of their own, and rows that bound sums of them."""

    uppers: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def variable(self, upper: float = 1.0) -> int:
        """A new variable between 0 and `upper`."""
        self.uppers.append(upper)
        return len(self.uppers) - 1

    def constrain(self, terms: Terms, low: float = -math.inf, high: float = math.inf) -> int:
        """A new row: the sum of `terms` lies between `low` and `high`."""
        self.rows.append(combine(terms))
        self.bounds.append((low, high))
        return len(self.rows) - 1


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
    """Limit of each run."""
    num_solves: int = 0
    num_unproven: int = 0
    """Runs that ended at a limit."""
    worst_gap: float = 0.0
    """Largest gap that any integer program was left with."""


class Solver:
    """One program inside HiGHS; `minimize` may be called again after a change of costs or bounds."""

    def __init__(self, program: Program, log: SolverLog, *, integer: bool) -> None:
        import highspy

        self._log = log
        self._integer = integer
        self._num_columns = len(program.uppers)
        self._highs = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": 1,
            "primal_feasibility_tolerance": TOLERANCE,
            "dual_feasibility_tolerance": TOLERANCE,
            "mip_feasibility_tolerance": TOLERANCE,
            "mip_abs_gap": 0.0,
            "mip_rel_gap": log.gap,
            "mip_max_nodes": MAX_NODES,
            # A relaxation starts from the last basis, which presolve would throw away.
            "presolve": "on" if integer else "off",
        }
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(_to_highs(program, integer))

    def bound(self, row: int, low: float = -math.inf, high: float = math.inf) -> None:
        """Replace the bounds of `row`."""
        self._highs.changeRowBounds(row, low, high)

    def minimize(self, costs: Terms) -> Sequence[float] | None:
        """The value of each variable where the sum of `costs` is least; None if no solution was found."""
        import highspy
        import numpy

        dense = numpy.zeros(self._num_columns)
        for variable, cost in costs:
            dense[variable] += cost
        self._highs.changeColsCost(self._num_columns, numpy.arange(self._num_columns, dtype=numpy.int32), dense)
        # HiGHS counts the time of all its runs.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + self._log.seconds)
        self._highs.run()
        self._log.num_solves += 1
        status, information = self._highs.getModelStatus(), self._highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return None
        is_proven = status == highspy.HighsModelStatus.kOptimal
        self._log.num_unproven += not is_proven
        if self._integer:
            self._log.worst_gap = max(self._log.worst_gap, information.mip_gap)
        found = information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return self._highs.getSolution().col_value if found else None


def _to_highs(program: Program, integer: bool) -> highspy.HighsLp:
    import highspy
    import numpy

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.uppers), len(program.rows)
    model.col_cost_ = numpy.zeros(model.num_col_)
    model.col_lower_ = numpy.zeros(model.num_col_)
    model.col_upper_ = numpy.array(program.uppers, dtype=float)
    model.row_lower_ = numpy.array([low for low, _ in program.bounds], dtype=float)
    model.row_upper_ = numpy.array([high for _, high in program.bounds], dtype=float)
    entries: list[tuple[int, Any]] = [entry for row in program.rows for entry in row.items()]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = numpy.cumsum([0, *(len(row) for row in program.rows)])
    model.a_matrix_.index_ = numpy.array([variable for variable, _ in entries], dtype=numpy.int32)
    model.a_matrix_.value_ = numpy.array([coefficient for _, coefficient in entries], dtype=float)
    if integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * model.num_col_
    return model
