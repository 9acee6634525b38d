"""Solver models of the kinds of blocks in a profile, and results that do not depend on the output head or the budget.

Several copies of a profile, which differ in the tiles of some blocks, have kinds in common. The results of a kind are
then computed once for all copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from adacc_hf.solve.byte_prices import price_by_bytes
from adacc_hf.solve.frontier import frontiers
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import KindModel, PricedPlan, build_block_model

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import KindProfile
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import Profile


class SolverKind:
    """One kind of block: the solver's model, the frontier, and the outcomes of the plans simulated so far."""

    def __init__(
        self, kind: KindProfile, model: KindModel, log: SolverLog, outcomes: dict[Plan, BlockOutcome] | None = None
    ) -> None:
        self.kind = kind
        self.model = model
        self.outcomes = {} if outcomes is None else outcomes
        """Cache of the simulated outcomes. Outcomes do not depend on the prices of the model."""
        self._log = log

    @cached_property
    def frontier(self) -> list[PricedPlan]:
        """Corners of the lower convex hull of all plans in bytes and ms."""
        return frontiers(self._log, [self.model])[0]

    @cached_property
    def extended(self) -> list[PricedPlan]:
        """Frontier plans and checkpointed plans.

        A checkpointed block stores more than the last frontier plan, but its backward may need less memory than the
        backward of a plan that replays everything.
        """
        return [*self.frontier, *self.model.checkpoints]

    @cached_property
    def by_bytes(self) -> SolverKind:
        """The same kind of block with prices in bytes, which do not depend on measured times."""
        return SolverKind(self.kind, price_by_bytes(self.model), self._log, self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Solver models and frontiers of the kinds of blocks in a profile, for all heads and budgets."""

    members: list[SolverKind]
    """The kinds, in the order of the profile."""
    plain_stored_bytes: int
    """Bytes that plain training stores. Budgets given as a fraction refer to this number, for every head."""
    log: SolverLog

    @classmethod
    def of(cls, profile: Profile, config: AdaccConfig, others: Iterable[Kinds] = ()) -> Kinds:
        """Return the kinds of `profile`. Kinds that `others` have too are taken from there, with their results.

        `others` belong to copies of the profile with other tiles, the first to the copy without tiles.
        """
        others = list(others)
        log = SolverLog(gap=config.solver_gap, seconds=config.solver_seconds)
        solved = [member for other in others for member in other.members]
        members = []
        for kind in profile.kinds:
            member = next((each for each in solved if each.kind == kind), None)
            members.append(member or SolverKind(kind, build_block_model(kind, config), log))
        plain_stored_bytes = others[0].plain_stored_bytes if others else profile.plain_stored_bytes
        return cls(members=members, plain_stored_bytes=plain_stored_bytes, log=log)

    @property
    def models(self) -> list[KindModel]:
        return [member.model for member in self.members]

    @property
    def outcomes(self) -> list[dict[Plan, BlockOutcome]]:
        return [member.outcomes for member in self.members]

    @property
    def frontiers(self) -> list[list[PricedPlan]]:
        return [member.frontier for member in self.members]

    @property
    def extended(self) -> list[list[PricedPlan]]:
        return [member.extended for member in self.members]

    @cached_property
    def by_bytes(self) -> Kinds:
        """The same kinds of blocks with prices in bytes, which do not depend on measured times."""
        return replace(self, members=[member.by_bytes for member in self.members])
