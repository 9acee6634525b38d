"""Error for a budget that no policy fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from adacc_hf.artifacts.budget_values import budget_hint
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.config import AdaccConfig, Budget
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile


def infeasible_budget(
    profile: Profile, config: AdaccConfig, budget: Budget, least: Policy, bound: int
) -> InfeasibleBudgetError:
    """Return the error for a budget below the bytes that `least` needs, the policy with the least memory.

    `bound` is a lower bound on the bytes that any policy needs.
    """
    needed = budget.needed_bytes(least)
    text = (
        _peak_text(profile, config, budget, least)
        if budget.limits_peak
        else _stored_text(profile, config, budget, least)
    )
    if bound < needed:
        text += (
            f". This is the least of all policies that were tried; no policy needs less than {bound} bytes "
            f"({format_bytes(bound)})"
        )
    return InfeasibleBudgetError(text, needed, min(bound, needed), least)


def _stored_text(profile: Profile, config: AdaccConfig, budget: Budget, least: Policy) -> str:
    floor, plain = least.predicted_stored_bytes, profile.plain_stored_bytes
    fraction = math.ceil(floor / plain * 1e4) / 1e4
    outside = profile.outside_stored_bytes + sum(shared.nbytes for shared in profile.shared if shared.saved)
    return (
        f"memory_budget={budget.setting!r} allows {format_bytes(budget.nbytes)} of the {format_bytes(plain)} that "
        f"plain training stores for backward, but the least possible is {floor} bytes ({format_bytes(floor)}), a "
        f"fraction of {fraction:.4f}: {format_bytes(outside)} are stored outside the blocks ({profile.head} head) and "
        f"{format_bytes(floor - outside)} by the blocks with {config.describe_actions()}. Raise memory_budget, allow "
        f"more actions or codecs, or use a smaller batch"
    )


def _peak_text(profile: Profile, config: AdaccConfig, budget: Budget, least: Policy) -> str:
    outcome = simulate_policy(profile, least)
    needed = outcome.peak_bytes
    hint = f"{text}," if (text := budget_hint(budget.nbytes)) else ""
    origin = f" ({budget.nbytes} bytes)" if isinstance(budget.setting, str) else ""
    return (
        f"memory_budget={budget.setting!r}{origin}{hint} is below the least possible peak of {needed} bytes "
        f"({format_bytes(needed)}), reached in {outcome.peak_label!r} with {config.describe_actions()} and a "
        f"{profile.head} head: {format_bytes(profile.static_bytes)} are live before a forward (parameters, optimizer "
        f"state, batches), and at least {format_bytes(outcome.stored_bytes)} are stored for backward. Raise "
        f"memory_budget, allow more actions or codecs, or use a smaller batch or shorter sequences"
    )
