"""PolicyBuilder: profiles batches during the run, and gets their policies from the solver or a user's function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from adacc_hf.adapt.coverage import refuse_whole_blocks
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_limits import refuse_above_budget, refuse_above_host_memory, refuse_other_actions
from adacc_hf.adapt.profile_updates import SwitchedOff, with_finer, without_codecs
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError, as_sentence
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.memory_profile import with_missing_bytes
from adacc_hf.solve.solver import least_policy, solve_policy
from adacc_hf.torch_glue.distributed import (
    broadcast_from_first_rank,
    check_same_policy,
    gather_from_all_ranks,
)
from adacc_hf.torch_glue.memory import FRAGMENTATION_HINT, has_expandable_segments
from adacc_hf.torch_glue.progress import SOLVING, interruption

if TYPE_CHECKING:
    from adacc_hf.adapt.run_state import RunState

log = logging.getLogger(__name__)

PolicySource = Policy | str | Path | Callable[[Profile], Policy]


class RefusedSizeError(Exception):
    """Error raised during the run if no policy can be made for a new batch size, or for batches on which more blocks
    are trained."""


class PolicyBuilder:
    """Builder of a run's policies: profiles batches and runs the solver. A user's `policy` function replaces the
    solver."""

    def __init__(self, run: RunState) -> None:
        self._run, self._config, self._source, self._profiler = run, run.config, run.source, run.profiler

    def first(self, profile: Profile) -> tuple[Policy, bool]:
        """Return (policy, is_provisional) for the run's first profile. The result is the same on all ranks.

        If the budget is a limit on peak memory, `is_provisional` is True: the policy is solved again after the first
        measured step. If an optimizer steps within the backward, a profile cannot predict the peak, and the provisional
        policy needs the least memory of all. Raises InfeasibleBudgetError if no policy fits the budget.
        """
        self._warn_fragments(profile)
        limits_peak = Budget.resolve(self._config.memory_budget, profile, self._config).limits_peak
        is_provisional = self._source is None and limits_peak
        has_inner_steps = any(gather_from_all_ranks(self._profiler.inner_steps.has_detected))

        def solve() -> Policy:
            policy = self._solve(profile, self._config.memory_budget)  # raises if even the least memory is too much
            return least_policy(profile, self._config) if is_provisional and has_inner_steps else policy

        with interruption(SOLVING, "solving for the first policy"):
            policy = broadcast_from_first_rank(solve)
        check_same_policy(policy)
        return policy, is_provisional

    def later(self, measured: Profile, choice: PolicyChoice) -> tuple[Profile, Policy]:
        """Return (profile, policy) for the profile of a later micro-batch, of other sizes or with other operators.

        Raises RefusedSizeError if no policy fits the budget.
        """
        profile = self._corrected(measured, choice.context)
        return profile, self._solve_again(profile, choice.context)

    def _corrected(self, profile: Profile, context: RunContext) -> Profile:
        """Return `profile` with the bytes that earlier steps took beyond their profiles, and with INT8 for values whose
        codec was switched off."""
        corrected = with_missing_bytes(profile, context.missing_bytes)
        return with_finer(corrected, context.switched_off, self._config)

    def _solve_again(self, profile: Profile, context: RunContext) -> Policy:
        """Return the policy for a profile made during the run. All ranks get the same policy.

        Raises RefusedSizeError if no policy fits the budget.
        """
        try:
            with interruption(SOLVING, "solving for a policy of the new profile"):
                policy = broadcast_from_first_rank(
                    lambda: self._solve(profile, context.memory_budget, context.switched_off)
                )
        except InfeasibleBudgetError as error:
            raise RefusedSizeError(str(error)) from error
        check_same_policy(policy)
        refuse_whole_blocks(self._config, policy, profile)
        return policy

    def _solve(self, profile: Profile, budget: float | int | str, switched_off: Collection[SwitchedOff] = ()) -> Policy:
        if callable(self._source):
            policy = self._source(profile)
            if not isinstance(policy, Policy):
                raise ValueError(f"policy=... is a function that returned {policy!r}: let it return a Policy")
            refuse_other_actions(policy, self._config)
            refuse_above_budget(policy, self._config.memory_budget, profile.plain_stored_bytes)
            refuse_above_host_memory(policy, self._config, self._config.host_limit(profile.host_free_bytes))
            return policy
        allowed = without_codecs(profile, switched_off) if switched_off else profile
        allowed = allowed.without_codecs_below(self._config.min_compress_bytes)
        try:
            return solve_policy(allowed, budget, self._config)
        except InfeasibleBudgetError as error:
            message = as_sentence(error)
            if not isinstance(budget, float) and not self._profiler.counted_state_bytes:
                message += " State that the optimizer creates in its first step comes on top."
            if budget == "auto" and profile.device.startswith("cuda") and not has_expandable_segments():
                message += f" {FRAGMENTATION_HINT}"
            raise InfeasibleBudgetError(message, error.smallest_budget_bytes, error.bound_bytes, error.least) from None

    def _warn_fragments(self, profile: Profile) -> None:
        """Log, before the first step, by how much fragmentation of the GPU's memory reduces the budget."""
        if not profile.device.startswith("cuda") or has_expandable_segments():
            return
        budget = Budget.resolve(self._config.memory_budget, profile, self._config)
        if budget.setting == "auto":
            log.info("Adacc: %s", FRAGMENTATION_HINT)
        elif budget.limits_peak and budget.nbytes > profile.available_bytes:
            log.warning(
                "Adacc: memory_budget=%r is more than the %s of the GPU that remain after fragmentation: set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training, or a budget of at most that",
                budget.setting,
                format_bytes(profile.available_bytes),
            )
