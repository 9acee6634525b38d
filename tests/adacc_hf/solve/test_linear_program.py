"""Linear and integer programs: repeated solutions by HiGHS, and the log of its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count

import highspy
import pytest

from adacc_hf.solve.linear_program import LinearProgram, Solver, silence_highs


def test_the_solvers_first_words_do_not_reach_stdout(monkeypatch, capfd) -> None:
    """HiGHS 1.16 writes its version when its first model is constructed. `adacc plan --json` writes to stdout too."""
    monkeypatch.setattr(highspy, "Highs", lambda: os.write(1, b"Running HiGHS"))
    silence_highs.cache_clear()
    print("before")
    silence_highs()
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"
    silence_highs()  # once
    assert capfd.readouterr().out == ""


def knapsack() -> tuple[LinearProgram, int]:
    """A program with three items of 3, 4 and 5 bytes and a limit of 7 bytes."""
    program = LinearProgram()
    things = [program.variable() for _ in range(3)]
    return program, program.constrain(zip(things, (3.0, 4.0, 5.0), strict=True), high=7.0)


def test_a_row_without_bounds_gets_them_later() -> None:
    program = LinearProgram()
    x = program.variable(2.0)
    row = program.constrain([(x, 3.0)])
    solver = Solver(program, integer=False)
    assert solver.minimize([(x, -1.0)]) == pytest.approx([2.0])
    solver.bound(row, high=3.0)
    assert solver.minimize([(x, -1.0)]) == pytest.approx([1.0])
    solver.bound(row)
    assert solver.minimize([(x, -1.0)]) == pytest.approx([2.0])


def test_the_solution_has_every_variable_in_its_own_place() -> None:
    program = LinearProgram()
    xs = [program.variable(float(k)) for k in range(12)]  # the last two in no row
    program.constrain([(x, 1.0) for x in xs[:10]], low=0.0)
    program.constrain([(xs[1], 1.0), (xs[2], 1.0)], high=2.0)
    solution = Solver(program, integer=False).minimize((x, -2.0 if x == xs[2] else -1.0) for x in xs)
    assert solution == pytest.approx([0, 0, *range(2, 12)])


VALUES = [(0, -4.0), (1, -5.0), (2, -6.0)]


def test_a_variable_may_occur_twice_in_a_sum() -> None:
    program = LinearProgram()
    x = program.variable(10)
    program.constrain([(x, 1), (x, 2)], high=12)
    (value,) = Solver(program, integer=False).minimize([(x, -1), (x, -1)])
    assert value == pytest.approx(4.0)


@pytest.mark.parametrize("integer", [True, False])
def test_costs_and_bounds_may_change_between_runs(integer: bool) -> None:
    program, row = knapsack()
    solver = Solver(program, integer=integer)
    assert solver.minimize(VALUES) == pytest.approx([1, 1, 0])
    solver.bound(row, high=12.0)
    assert solver.minimize(VALUES) == pytest.approx([1, 1, 1])
    assert solver.minimize([(0, 1.0), (1, -1.0), (2, 1.0)]) == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("limit", [None, 0], ids=["no answer", "not the optimum"])
def test_a_run_that_stalls_starts_again(limit, monkeypatch) -> None:
    """From the basis of an earlier run, HiGHS 1.15 sometimes ends without an answer (status Unknown)."""
    program, _ = knapsack()
    solver = Solver(program, integer=False)
    run, num_runs = highspy.Highs.run, count()

    def first_stalls(highs: highspy.Highs) -> None:
        is_later = next(num_runs) > 0
        highs.setOptionValue("simplex_iteration_limit", 1000 if is_later else 0)
        if is_later or limit is not None:
            run(highs)

    monkeypatch.setattr(highspy.Highs, "run", first_stalls)
    assert solver.minimize([(0, -1.0)]) == pytest.approx([1, 0, 0])


def test_a_program_without_a_solution_says_so() -> None:
    program = LinearProgram()
    x = program.variable()
    program.constrain([(x, 1)], low=2)
    assert Solver(program, integer=True).minimize([(x, 1.0)]) is None


def test_the_first_program_leaves_nothing_of_its_callers_alive() -> None:
    """The first program keeps none of its caller's objects alive. PuLP keeps errors of its import with the frames
    below, and a new process imports PuLP anew."""
    code = """
import gc, weakref
from adacc_hf.solve.linear_program import LinearProgram

class Model: pass

def solve():
    model = Model()
    LinearProgram()
    return weakref.ref(model)

model = solve()
gc.collect()
assert model() is None
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
