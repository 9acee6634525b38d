"""The first policy of a run: from the solver, a user's function, or the checkpoint that the run resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adacc_hf.adapt.policy_checks import refuse_above_budget, refuse_above_host_memory, refuse_other_actions
from adacc_hf.adapt.policy_fit import suitable_policy, uses_up
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError, as_sentence
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.solver import least_policy, solve_policy
from adacc_hf.torch_glue.distributed import (
    broadcast_from_first_rank,
    gather_from_all_ranks,
)
from adacc_hf.torch_glue.memory import FRAGMENTATION_HINT, has_expandable_segments
from adacc_hf.torch_glue.progress import reported_if_slow

if TYPE_CHECKING:
    from adacc_hf.adapt.run_state import RunState

log = logging.getLogger(__name__)

PolicySource = Policy | str | Path | Callable[[Profile], Policy]


def first_policy(run: RunState, profile: Profile, saved: Sequence[Policy] = ()) -> Policy:
    """Return the policy for the run's first profile. The result is the same on all ranks.

    `profile` includes the corrections of a resumed run, and one of the `saved` policies of its checkpoint is used if
    it fits well. If the budget limits the peak and an optimizer steps within backward, no profile predicts the peak:
    the policy that needs the least memory is used. Raises InfeasibleBudgetError if no policy fits the budget.
    """
    config, source, corrections = run.config, run.source, run.corrections
    _warn_fragments(profile, config)
    has_inner_steps = any(gather_from_all_ranks(run.profiler.inner_steps.has_detected))
    budget = run.budget(profile)

    def solve() -> Policy:
        if callable(source):
            return _policy_of(source, profile, config)
        allowed = corrections.allowed(profile)
        policy = _well_fitting(saved, allowed, budget, config)
        if policy is None:
            policy = _solved(run, allowed, corrections.memory_budget)  # raises if even the least memory is too much
        return least_policy(profile, config) if has_inner_steps and budget.limits_peak else policy

    with reported_if_slow("solving for the first policy"):
        return broadcast_from_first_rank(solve)


def _policy_of(source: Callable[[Profile], Policy], profile: Profile, config: AdaccConfig) -> Policy:
    policy = source(profile)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy=... is a function that returned {policy!r}: let it return a Policy")
    refuse_other_actions(policy, config)
    refuse_above_budget(policy, config.memory_budget, profile.plain_stored_bytes)
    refuse_above_host_memory(policy, config, config.host_limit(profile.host_free_bytes))
    return policy


def _well_fitting(saved: Sequence[Policy], profile: Profile, budget: Budget, config: AdaccConfig) -> Policy | None:
    """Return the fastest of the `saved` policies that are suitable for `profile` and use up the budget, or None."""
    suitable = (suitable_policy(policy, profile, config) for policy in saved)
    fitting = [p for p in suitable if p and uses_up(p, budget) and budget.needed_bytes(p) <= budget.nbytes]
    return min(fitting, key=lambda policy: policy.predicted_overhead_ms, default=None)


def _solved(run: RunState, profile: Profile, budget: str | float | int) -> Policy:
    try:
        return solve_policy(profile, budget, run.config)
    except InfeasibleBudgetError as error:
        message = as_sentence(error)
        if not isinstance(budget, float) and not run.profiler.counted_state_bytes:
            message += " State that the optimizer creates in its first step comes on top."
        if budget == "auto" and profile.device.startswith("cuda") and not has_expandable_segments():
            message += f" {FRAGMENTATION_HINT}"
        raise InfeasibleBudgetError(message, error.smallest_budget_bytes, error.bound_bytes, error.least) from None


def _warn_fragments(profile: Profile, config: AdaccConfig) -> None:
    """Log, before the first step, by how much fragmentation of the GPU's memory reduces the budget."""
    if not profile.device.startswith("cuda") or has_expandable_segments():
        return
    budget = Budget.resolve(config.memory_budget, profile, config)
    if budget.setting == "auto":
        log.info("Adacc: %s", FRAGMENTATION_HINT)
    elif budget.limits_peak and budget.nbytes > profile.available_bytes:
        log.warning(
            "Adacc: memory_budget=%r is more than the %s of the GPU that remain after fragmentation: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training, or a budget of at most that",
            budget.setting,
            format_bytes(profile.available_bytes),
        )
