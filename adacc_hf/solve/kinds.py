"""Solver models of the kinds of blocks in a profile, and results that do not depend on the output head or the budget.

Several copies of a profile, which differ in the tiles of some blocks, have kinds in common. The results of a kind are
then computed once for all copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.solve.frontier import frontiers
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import KindModel, PricedPlan, build_block_model

if TYPE_CHECKING:
    from adacc_hf.artifacts.block_walk import BlockOutcome
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import KindProfile, Operator
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.solve.milp import StoredForm


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
        log = SolverLog()
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


# Times computed from bytes, for results that must not depend on the noise of measurements.


MS_PER_BYTE = 1e-6
"""Assumed time in ms per byte that an operator or a codec reads or writes. Any positive number gives the same
policies."""


def price_by_bytes(model: KindModel) -> KindModel:
    """Return a copy of `model` in which the time of each operator, codec and checkpoint is proportional to bytes.

    The time of an operator is proportional to the bytes that it reads and writes. The time of a codec is proportional
    to the bytes of the tensor and of its encoded payload, once for encoding and once for decoding. Actions and stored
    bytes do not change.
    """
    kind, profiled_kind = _kind_by_bytes(model.kind), _kind_by_bytes(model.profiled_kind)
    value_bytes = [value.nbytes for value in kind.values]
    menus = {
        value: tuple(
            form if form.choice == RETAIN else replace(form, ms=_codec_ms(value_bytes[value], form)) for form in menu
        )
        for value, menu in model.menus.items()
    }
    rerun_ms = sum(operator.ms for operator in profiled_kind.operators)
    checkpoints = tuple(
        replace(plan, ms=rerun_ms + MS_PER_BYTE * (plan.nbytes + plan.host_bytes)) for plan in model.checkpoints
    )
    return replace(model, kind=kind, profiled_kind=profiled_kind, menus=menus, checkpoints=checkpoints)


def _kind_by_bytes(kind: KindProfile) -> KindProfile:
    operators = tuple(replace(op, ms=_operator_ms(kind, op)) for op in kind.operators)
    return replace(kind, operators=operators, extra_ms=0.0)


def _codec_ms(nbytes: int, form: StoredForm) -> float:
    return 2 * MS_PER_BYTE * (nbytes + form.nbytes + form.host_bytes)


def _operator_ms(kind: KindProfile, operator: Operator) -> float:
    # A view makes no bytes of its own, but a replay of it is not free: each operator costs at least one byte.
    return MS_PER_BYTE * (1 + sum(kind.values[value].nbytes for value in (*operator.inputs, *operator.outputs)))
