"""The paper's own program: one plan for all blocks of a kind, where `solve_policy` may mix plans over blocks."""

from __future__ import annotations

from collections import Counter

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.frontier import MixtureProgram, frontiers
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import build_block_model


def solve_one_policy(profile: Profile, budget: str | float | int, config: AdaccConfig) -> Policy:
    """The fastest policy with one plan per kind that stores at most the fraction `budget` of what plain training does.

    Raises ValueError for a budget that is no fraction, and InfeasibleBudgetError if nothing fits.
    """
    if not isinstance(budget, float) or not 0.0 < budget <= 1.0:
        raise ValueError(f"budget={budget!r} must be a fraction in (0, 1]: one plan for all is solved for stored bytes")
    program = _program(profile, config)
    cap_bytes = int(budget * profile.plain_stored_bytes)
    columns = program.least_ms(cap_bytes)
    if columns is None:
        floor = Policy.build(profile, [column.plan for column in program.least_bytes()])
        raise InfeasibleBudgetError(
            f"memory_budget={budget!r} allows {format_bytes(cap_bytes)} of stored activations, and one plan for all "
            f"blocks stores at least {format_bytes(floor.predicted_stored_bytes)}: raise memory_budget",
            floor.predicted_stored_bytes,
        )
    return Policy.build(profile, [column.plan for column in columns], {"memory_budget": budget, "one_plan": True})


def one_plan_policies(profile: Profile, config: AdaccConfig) -> list[Policy]:
    """The policies with one plan per kind that are fastest for what they store, at every percent of plain training's
    bytes, and those with one plan out of each kind's frontier if there is one kind."""
    program = _program(profile, config)
    found = [program.least_ms(profile.plain_stored_bytes * percent // 100) for percent in range(1, 101)]
    found += [program.least_bytes()]
    if len(profile.kinds) == 1:
        (frontier,) = frontiers(SolverLog(), [build_block_model(profile.kinds[0], config)])
        found += [[column] * len(profile.blocks) for column in frontier]
    plans = dict.fromkeys(tuple(column.plan for column in columns) for columns in found if columns is not None)
    return [Policy.build(profile, policy) for policy in plans]


def _program(profile: Profile, config: AdaccConfig) -> MixtureProgram:
    """The program in which all blocks of a kind are free together, and so share one plan."""
    models = [build_block_model(kind, config) for kind in profile.kinds]
    blocks = Counter(block.kind for block in profile.blocks)
    num_free = [blocks[k] for k in range(len(models))]
    log = SolverLog(gap=config.solver_gap, seconds=config.solver_seconds)
    return MixtureProgram(profile, models, [[]] * len(models), num_free, log)
