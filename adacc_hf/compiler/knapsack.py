"""Knapsack solver for torch's activation_memory_budget, with this package's operator times and integer program."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import fx

from adacc_hf.compiler.functorch import CustomKnapsackSolver
from adacc_hf.compiler.graph_cost import OperatorTimes
from adacc_hf.solve.linear_program import LinearProgram, Solver, SolverLog


class AdaccKnapsack(CustomKnapsackSolver):
    """Solver that chooses the tensors that torch's partitioner stores for backward, within torch's memory budget.

    Operator times are measured on this machine, and the choice is optimal. Nothing is compressed. The solver and the
    budget are set in torch:

        torch._functorch.config.activation_memory_budget_solver = AdaccKnapsack()
        torch._functorch.config.activation_memory_budget = 0.5
    """

    def __init__(self) -> None:
        self._times = OperatorTimes()

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Return the indices of the nodes to store for backward and of the nodes to recompute.

        `memory` contains the size of each of `all_recomputable_banned_nodes`, in the unit of `max_memory`.
        """
        times = [self._times.replay_ms(node) for node in all_recomputable_banned_nodes]
        saved = set(best_saved(memory, times, max_memory))
        return sorted(saved), [index for index in range(len(memory)) if index not in saved]

    def uuid(self) -> str:
        source = Path(__file__).read_bytes()
        return f"adacc_hf knapsack {hashlib.sha256(source).hexdigest()[:16]}"


def best_saved(memory: list[float], times: list[float], max_memory: float) -> list[int]:
    """Return the indices of the tensors to store within `max_memory`: the set that would take longest to recompute."""
    program = LinearProgram()
    variables = [program.variable() for _ in memory]
    scale = max(max_memory, sum(memory)) or 1.0
    program.constrain([(x, size / scale) for x, size in zip(variables, memory, strict=True)], high=max_memory / scale)
    solution = Solver(program, SolverLog(), integer=True).minimize(
        [(x, -ms) for x, ms in zip(variables, times, strict=True)]
    )
    assert solution is not None, "saving nothing is always a solution"
    return [index for index, x in enumerate(variables) if solution[x] > 0.5]
