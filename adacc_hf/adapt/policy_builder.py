"""PolicyBuilder: profiles batches during the run, and gets their policies from the solver or a user's function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adacc_hf.adapt.coverage import refuse_whole_blocks
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_limits import refuse_above_budget, refuse_above_host_memory, refuse_other_actions
from adacc_hf.adapt.policy_selection import UNCERTAINTY
from adacc_hf.adapt.profile_updates import SwitchedOff, with_finer, without_codecs
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError, UncalledBlocksError, as_sentence
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.memory_profile import with_missing_bytes
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy, provisional_policy, solve_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, from_profile_shapes, has_same_tensors
from adacc_hf.torch_glue.compat import forward_needs_all_ranks
from adacc_hf.torch_glue.distributed import (
    broadcast_from_first_rank,
    check_same_policy,
    common_profile,
    gather_from_all_ranks,
    is_sharded,
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

    def before_first_step(
        self, batch: dict[str, Any], compute_loss: ComputeLoss | None
    ) -> tuple[Profile, Policy] | None:
        """Return (profile, policy) for the first batch, before the first step. The result is the same on all ranks.

        If the budget is a limit on peak memory, the policy is plain training if plain training fits. Otherwise it is a
        policy that needs little memory (`provisional_policy`), and is replaced after the first measured step.

        Return None if, on some rank, the model skips blocks on this batch or returns no loss. Also return None if the
        forward runs collectives that do not gather sharded parameters, or if the ranks cannot profile equal parts of
        their batches.
        Raises InfeasibleBudgetError if no policy fits the budget, and torch.OutOfMemoryError if memory runs out.
        """
        model, optimizer = self._run.model, self._run.optimizer
        if forward_needs_all_ranks(model) and not is_sharded(model):
            self._profiler.note_unpredicted("forward needs all ranks, so it cannot run on parts of the first batch")
            return None
        try:
            estimated = self._profiler.estimate(model, optimizer, batch, compute_loss)
        except torch.OutOfMemoryError as error:
            raise self._profiler.with_advice(error, batch) from error
        if not all(gather_from_all_ranks(estimated is not None)) or estimated is None:
            if estimated is not None:
                self._profiler.note_unpredicted("another rank has no profile")
            return None
        profile = common_profile(estimated)
        self._warn_fragments(profile)
        with interruption(SOLVING, "solving for the first policy"):
            policy = broadcast_from_first_rank(lambda: self._before_measurement(profile))
        check_same_policy(policy)
        return profile, policy

    def _before_measurement(self, profile: Profile) -> Policy:
        budget = Budget.resolve(self._config.memory_budget, profile, self._config)
        if callable(self._source) or not budget.limits_peak:
            return self._solve(profile, self._config.memory_budget)
        uncertainty = 0.0 if profile.sizes is None else profile.sizes.uncertainty
        plain = uniform_policy(profile, Action.RETAIN)
        if plain.predicted_peak_bytes * (1 + uncertainty) <= budget.nbytes:
            fastest = self._solve(profile, self._config.memory_budget)
            if fastest.is_plain:
                return fastest
        allowed = profile.without_codecs_below(self._config.min_compress_bytes)
        policy = provisional_policy(allowed, int(budget.nbytes / (1 + UNCERTAINTY)), self._config)
        if policy.predicted_peak_bytes <= budget.nbytes:
            return policy
        return self._solve(profile, self._config.memory_budget)

    def after_steps(
        self, batch: dict[str, Any] | None, compute_loss: ComputeLoss | None
    ) -> tuple[Profile, Policy, bool]:
        """Return (profile, policy, is_provisional) for the most recent batch, after steps under torch's checkpoint.

        If an optimizer steps within the backward and the budget is a limit on peak memory, a profile cannot predict the
        peak. In this case, `is_provisional` is True: the policy needs the least memory of all, and is replaced after
        the first measured step. Raises InfeasibleBudgetError if no policy fits the budget, and torch.OutOfMemoryError
        if memory runs out.
        """
        try:
            profile = self._profiler.measure(self._run.model, self._run.optimizer, batch, compute_loss)
        except torch.OutOfMemoryError as error:
            raise self._profiler.with_advice(error, batch or {}) from error
        self._warn_fragments(profile)
        is_provisional = (
            self._source is None
            and any(gather_from_all_ranks(self._profiler.inner_steps.has_detected))
            and Budget.resolve(self._config.memory_budget, profile, self._config).limits_peak
        )

        def solve() -> Policy:
            policy = self._solve(profile, self._config.memory_budget)  # raises if even the least memory is too much
            return least_policy(profile, self._config) if is_provisional else policy

        with interruption(SOLVING, "solving for the first policy"):
            policy = broadcast_from_first_rank(solve)
        check_same_policy(policy)
        return profile, policy, is_provisional

    def for_size(
        self, sizes: BatchShapes, choice: PolicyChoice, batch: dict[str, Any] | None, compute_loss: ComputeLoss | None
    ) -> tuple[BatchShapes, Profile, Policy] | None:
        """Return (sizes, profile, policy) for batches of `sizes`. Profile the step's `batch`, resized to `sizes`.

        If the model raises an error on the resized batch, the batch is profiled at its own sizes, which are returned.
        Return None if the step's batch cannot be used for the profile. Raises RefusedSizeError if no batch of these
        sizes can be used.
        """
        shapes, run = choice.shapes, self._run
        if not all(gather_from_all_ranks(batch is not None and has_same_tensors(shapes, sizes))) or batch is None:
            return None
        with self._refusing_size():
            result = self._profiler.measure_resized(sizes, batch, shapes, run.model, run.optimizer, compute_loss)
        if result is None:
            return None
        profiled_sizes, measured = result
        profile = self._corrected(measured, choice.context)
        if profile.sizes is not None:
            profiled_sizes = from_profile_shapes(profile.measured[0][0])
        policy = self._solve_again(profile, choice.context)
        if policy.idle_blocks - choice.cache.idle_blocks:
            raise RefusedSizeError("they train fewer blocks, and a policy needs all of them")
        return profiled_sizes, profile, policy

    def for_all_blocks(
        self, choice: PolicyChoice, batch: dict[str, Any] | None, compute_loss: ComputeLoss | None
    ) -> tuple[Profile, Policy]:
        """Return (profile, policy) for the step's batch, on which the model trains more blocks or runs other operators
        than before.

        Raises RefusedSizeError if the batch cannot be profiled, or if no policy fits the budget.
        """
        with self._refusing_size():
            measured = self._profiler.measure(self._run.model, self._run.optimizer, batch, compute_loss)
        profile = self._corrected(measured, choice.context)
        return profile, self._solve_again(profile, choice.context)

    @contextmanager
    def _refusing_size(self) -> Iterator[None]:
        """Convert two errors of profiling in the `with` block to RefusedSizeError.

        The two errors are torch.OutOfMemoryError, and UncalledBlocksError, which is raised if the model skips blocks on
        the batch.
        """
        try:
            yield
        except UncalledBlocksError as error:
            raise RefusedSizeError("they leave blocks out, and a policy needs all of them") from error
        except torch.OutOfMemoryError as error:
            if forward_needs_all_ranks(self._run.model):  # its forward was broken off, and cannot run again
                raise
            log.info("Adacc: out of memory while profiling: %s", error)
            raise RefusedSizeError("there is not enough memory to profile them") from error

    def _corrected(self, profile: Profile, context: RunContext) -> Profile:
        """Return `profile` with corrections from the measurements of earlier steps.

        The bytes by which a measured step exceeded its profile are added. For values whose codec was switched off, the
        precise codec (INT8) is a further option.
        """
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
