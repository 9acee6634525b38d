"""A memory budget in bytes, and what is said where nothing fits it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adacc_hf.artifacts.config import AdaccConfig, check_memory_budget, what_was_meant
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.step_peak import simulate
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.solve.frontier import fixed_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.solve.milp import PricedPlan


@dataclass(frozen=True)
class Budget:
    """A memory budget in bytes."""

    given: str | float | int
    nbytes: int
    of_peak: bool
    """Whether it bounds the peak of the step; else it bounds what is stored for backward."""

    @classmethod
    def resolve(cls, given: str | float | int, profile: Profile, config: AdaccConfig) -> Budget:
        """Raises ValueError unless `given` is one of the forms that `AdaccConfig.memory_budget` describes."""
        check_memory_budget(given, least_bytes=1)  # `infeasible_peak` says what a small one may have been meant as
        if isinstance(given, float):
            # The factor makes up for rounding: (n / plain) * plain must not come out below n.
            return cls(given, int(given * profile.plain_stored_bytes * (1 + 4e-16)), of_peak=False)
        if given == "auto":
            return cls(given, int(profile.available_bytes * (1 - config.memory_margin)), of_peak=True)
        return cls(given, parse_bytes(given, "memory_budget") if isinstance(given, str) else given, of_peak=True)


def infeasible_stored(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: int, plain: int
) -> InfeasibleBudgetError:
    fraction = math.ceil(floor / plain * 1e4) / 1e4
    outside = fixed_bytes(profile)
    return InfeasibleBudgetError(
        f"memory_budget={budget.given!r} allows {format_bytes(budget.nbytes)} of the {format_bytes(plain)} that plain "
        f"training stores for backward, and the least possible is {floor} bytes ({format_bytes(floor)}), a fraction of "
        f"{fraction:.4f}: {format_bytes(outside)} are stored outside the blocks ({profile.head} head) and "
        f"{format_bytes(floor - outside)} by the blocks with actions={config.actions!r}. Raise memory_budget, allow "
        f"more actions or codecs, or use a smaller batch",
        floor,
    )


def infeasible_peak(
    profile: Profile, config: AdaccConfig, budget: Budget, floor: list[PricedPlan], bound: int
) -> InfeasibleBudgetError:
    outcome = simulate(profile, [column.plan for column in floor])
    needed = outcome.peak_bytes
    meant = f"{said}," if (said := what_was_meant(budget.nbytes)) else ""
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.given, str) else ""
    return InfeasibleBudgetError(
        f"memory_budget={budget.given!r}{origin}{meant} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with actions={config.actions!r} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences",
        needed,
        min(bound, needed),
    )
