"""How a run comes by its policies: it waits under full recomputation; a batch is profiled and solved for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.controller import Controller
from adacc_hf.adapt.optimizer_hooks import InnerSteps, OptimizerProbe
from adacc_hf.adapt.profile_updates import SwitchedOff, with_finer, without_codecs
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import (
    InfeasibleBudgetError,
    NoEstimateError,
    OptimizerStateError,
    UncalledBlocksError,
    as_sentence,
)
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.price.batch_subsampling import NOT_TAKEN
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.memory_profile import NoSync, with_missing
from adacc_hf.price.optimizer_memory import coming_state_bytes
from adacc_hf.price.profiler import estimate_profile, profile_model
from adacc_hf.solve.solver import least_policy, quick_least_policy, solve_policy
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    batch_shapes,
    size_class_of,
    describe,
    from_profile_shapes,
    is_alike,
    resized,
)
from adacc_hf.torch_glue.distributed import (
    fail_together,
    check_same_policy,
    common_profile,
    broadcast_from_first_rank,
    is_sharded,
    num_ranks,
    gather_from_all_ranks,
    end_process_if_out_of_memory,
)
from adacc_hf.torch_glue.memory import FRAGMENTATION_HINT, is_out_of_memory, has_expandable_segments
from adacc_hf.torch_glue.private import is_profiling

log = logging.getLogger(__name__)

PolicySource = Policy | str | Path | Callable[[Profile], Policy]


ROUGHLY = 0.25
"""Part of the least peak of T5 that small parts tell of by which it may lie above the real one (0.21 was the most
measured). No budget is refused for less before a step was counted."""


class RefusedSizeError(Exception):
    """Batches of a size, or that train more blocks, get no policy of their own; the message says why."""


class PolicyBuilder:
    """Makes the policies of one run; a function of the profile that the user gave is asked instead of the solver.

    `optimizer` and `inner_steps` look at the run's own steps, for what a profile cannot see.
    """

    def __init__(self, config: AdaccConfig, given: PolicySource | None, loop: TrainingLoop) -> None:
        self.optimizer = OptimizerProbe()
        self.inner_steps = InnerSteps()
        self._config, self._given, self._loop = config, given, loop
        self._has_said_busy = False
        self.all_sizes = False
        """Whether batches differ in size, so that profiles tell of all sizes."""

    def remove(self) -> None:
        """Take everything off the optimizer. Harmless when called again."""
        self.optimizer.end()
        self.inner_steps.close()

    def must_wait(self, model: nn.Module) -> bool:
        """Return True if a profile has to wait until a profiler of torch's has ended on all ranks, and say so once."""
        if next(model.parameters()).device.type != "cpu" or not any(gather_from_all_ranks(is_profiling())):
            return False
        if not self._has_said_busy:
            self._has_said_busy = True
            log.warning(
                "Adacc: a profiler of torch's is at work, which a profile of memory on a CPU would end: the profile "
                "waits until a step ends without one, and the model trains as it did before. Let the profiler end, or "
                "begin some steps after profile_steps=%d",
                self._config.profile_steps,
            )
        return True

    def first(
        self, model: nn.Module, optimizer: Any, batch: dict[str, Any] | None, compute_loss: ComputeLoss | None
    ) -> tuple[Profile, Policy, bool]:
        """(profile, policy, whether it is provisional) for the last batch, and what makes its loss.

        A policy is provisional, and that of least memory, where the peak that the budget bounds is not known before a
        whole step of the run was counted. Raises InfeasibleBudgetError and torch.OutOfMemoryError.
        """
        profile = self._profile_or_explain(model, self._seen(batch), optimizer, compute_loss)
        self._tell_of_fragments(profile)
        is_provisional = self._is_provisional(profile)
        policy = broadcast_from_first_rank(lambda: self._first_policy(profile, is_provisional))
        check_same_policy(policy)
        return profile, policy, is_provisional

    def _tell_of_fragments(self, profile: Profile) -> None:
        """Say, before the first step, what the budget has to do with memory that falls apart."""
        if not profile.device.startswith("cuda") or has_expandable_segments():
            return
        budget = Budget.resolve(self._config.memory_budget, profile, self._config)
        if budget.given == "auto":
            log.info("Adacc: %s", FRAGMENTATION_HINT)
        elif budget.of_peak and budget.nbytes > profile.available_bytes:
            log.warning(
                "Adacc: memory_budget=%r is more than the %s of the GPU that are left beside fragments of its memory: "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training, or a budget of at most that",
                budget.given,
                format_bytes(profile.available_bytes),
            )

    def before_first_step(
        self, model: nn.Module, optimizer: Any, batch: dict[str, Any], compute_loss: ComputeLoss | None
    ) -> tuple[Profile, Policy] | None:
        """Return the profile and the policy for the first batch, before any step, the same on all ranks.

        The profile is estimated from small parts of the batch, or measured on the whole batch if the model cannot run
        on parts. Under a budget of the peak, the policy is plain training if that fits, else the policy of least
        memory; a counted step corrects it. None if the batch leaves blocks out or has no loss on some rank, or if a
        forward has collectives (sharded parameters, SyncBatchNorm), since ranks may run different numbers of parts.
        Raises InfeasibleBudgetError.
        """
        exchanges = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if is_sharded(model) or (exchanges and num_ranks() > 1):
            return None
        level, profile, reason = logging.INFO, None, "another rank has no profile"
        try:
            with self._profiling(model):
                try:
                    profile = self._told_or_whole(model, batch, optimizer, compute_loss)
                except (UncalledBlocksError, *NOT_TAKEN) as error:
                    if is_out_of_memory(error):
                        raise
                    reason = as_sentence(error)
                    level = logging.INFO if isinstance(error, UncalledBlocksError) else logging.WARNING
                    log.debug("Adacc: no profile of the first batch", exc_info=error)
        except torch.OutOfMemoryError as error:
            raise self._with_advice(error, batch) from error
        if not all(gather_from_all_ranks(profile is not None)) or profile is None:
            log.log(level, "Adacc: the first steps run under torch's checkpoint: %s", reason)
            return None
        profile = common_profile(profile)
        self._tell_of_fragments(profile)
        policy = broadcast_from_first_rank(lambda: self._begin_with(profile))
        check_same_policy(policy)
        return profile, policy

    def _told_or_whole(
        self, model: nn.Module, batch: dict[str, Any], optimizer: Any, compute_loss: ComputeLoss | None
    ) -> Profile:
        settings = self._settings(model, optimizer) | {"compute_loss": compute_loss}
        try:
            profile = estimate_profile(model, batch, self._config, optimizer, **settings)
        except (NoEstimateError, UncalledBlocksError, *NOT_TAKEN) as error:
            if is_out_of_memory(error):
                raise
            self._say_whole(batch, as_sentence(error))
        else:
            log.info("Adacc: the profile is told from small parts of the batch")
            return profile
        return profile_model(model, batch, self._config, optimizer, **settings)

    def _say_whole(self, batch: dict[str, Any], why: str) -> None:
        """Say that a whole batch is about to be profiled: a warning where the budget bounds the peak in bytes."""
        budget = self._config.memory_budget
        in_bytes = not isinstance(budget, float) and budget != "auto"
        log.log(
            logging.WARNING if in_bytes else logging.INFO,
            "Adacc: a whole batch of %s is profiled, which takes what one block makes on top of full recomputation and "
            "may be more than memory_budget=%r: %s",
            describe(batch_shapes(batch)),
            budget,
            why,
        )

    def _begin_with(self, profile: Profile) -> Policy:
        """The policy of the first step, for a profile that was told."""
        bounds_peak = Budget.resolve(self._config.memory_budget, profile, self._config).of_peak
        if callable(self._given) or not bounds_peak:
            return self._solve(profile, self._config.memory_budget)
        return self._careful(profile)

    def _careful(self, profile: Profile) -> Policy:
        """The policy to begin with for a profile that was told: plain training if it fits, else that of least memory.

        Raises InfeasibleBudgetError if none fits, but for a profile that is told roughly: a counted step shows it.
        """
        allowed = Budget.resolve(self._config.memory_budget, profile, self._config).nbytes
        try:
            policy = self._solve(profile, self._config.memory_budget)
        except InfeasibleBudgetError as error:
            # Two texts make more terms than small parts can tell apart.
            if (
                profile.sizes is None
                or not profile.sizes.is_rough
                or error.least is None
                or (1 - ROUGHLY) * error.smallest_budget_bytes > allowed
            ):
                raise
            return error.least
        room = 0.0 if profile.sizes is None else profile.sizes.uncertainty
        is_safe = policy.is_plain and policy.predicted_peak_bytes * (1 + room) <= allowed
        if is_safe:
            return policy
        return quick_least_policy(profile.without_codecs_below(self._config.min_compress_bytes), self._config)

    def for_size(
        self,
        wanted: BatchShapes,
        model: nn.Module,
        optimizer: Any,
        controller: Controller,
        batch: dict[str, Any] | None,
        compute_loss: ComputeLoss | None,
    ) -> tuple[BatchShapes, Profile, Policy] | None:
        """(sizes, profile, policy) for batches of the `wanted` sizes, from the step's batch made to them.

        The sizes are that batch's own where the model takes no other. None if this batch does not do for it; raises
        RefusedSizeError if no batch would.
        """
        seen = controller.last_shapes
        if not all(gather_from_all_ranks(batch is not None and is_alike(seen, wanted))) or batch is None:
            return None

        def profile(given: dict[str, Any]) -> Profile:
            self._say_whole(given, "no profile tells of batches of this size")
            return self._as_measured(self._profile(model, given, optimizer, compute_loss), controller)

        try:
            found = profile_at(wanted, batch, seen, model, profile)
        except UncalledBlocksError as error:
            raise RefusedSizeError("they leave blocks out, and a policy is for all of them") from error
        except torch.OutOfMemoryError as error:
            if is_sharded(model):  # whose forward was left in its midst
                raise
            log.info("Adacc: out of memory while profiling: %s", error)
            raise RefusedSizeError("there is no memory to profile them in") from error
        if found is None:
            return None
        shapes, priced = found
        if priced.sizes is not None:
            shapes = from_profile_shapes(priced.measured[0][0])
        policy = self._solve_again(priced, controller)
        if policy.idle_blocks - controller.idle_blocks:
            raise RefusedSizeError("they train fewer blocks, and a policy is for all of them")
        return shapes, priced, policy

    def for_all_blocks(
        self,
        model: nn.Module,
        optimizer: Any,
        controller: Controller,
        batch: dict[str, Any] | None,
        compute_loss: ComputeLoss | None,
    ) -> tuple[Profile, Policy]:
        """(profile, policy) for the step's batch, which runs more than what was profiled, or otherwise.

        Raises RefusedSizeError if there is no such policy.
        """
        try:
            profile = self._profile(model, self._seen(batch), optimizer, compute_loss)
        except torch.OutOfMemoryError as error:
            if is_sharded(model):  # as above
                raise
            raise RefusedSizeError("there is no memory to profile them in") from error
        priced = self._as_measured(profile, controller)
        return priced, self._solve_again(priced, controller)

    def _as_measured(self, profile: Profile, controller: Controller) -> Profile:
        """`profile` with what the run has shown so far: the bytes that no profile counts, and codecs that are off."""
        priced = with_missing(profile, controller.missing_bytes)
        return with_finer(priced, controller.guard.switched_off, self._config)

    def _solve_again(self, priced: Profile, controller: Controller) -> Policy:
        """The policy for a profile in the middle of a run, on all ranks."""
        try:
            policy = broadcast_from_first_rank(lambda: self._solve(priced, controller.memory_budget, controller.guard.switched_off))
        except InfeasibleBudgetError as error:
            raise RefusedSizeError(str(error)) from error
        check_same_policy(policy)
        return policy

    def _profile_or_explain(
        self, model: nn.Module, batch: dict[str, Any], optimizer: Any, compute_loss: ComputeLoss | None
    ) -> Profile:
        """The first profile, without which there is no policy."""
        try:
            return self._profile(model, batch, optimizer, compute_loss)
        except torch.OutOfMemoryError as error:
            raise self._with_advice(error, batch) from error

    def _with_advice(self, error: torch.OutOfMemoryError, batch: dict[str, Any]) -> torch.OutOfMemoryError:
        """`error`, with what to do about it."""
        return type(error)(
            f"{as_sentence(error)} Adacc was profiling a batch of {describe(batch_shapes(batch))}, which "
            f"takes what one block makes on top of full recomputation: use a smaller batch or shorter sequences"
            + ("" if self._config.heads == ("chunked",) else ", or head='chunked', which never makes whole logits")
        )

    def _profile(
        self, model: nn.Module, batch: dict[str, Any], optimizer: Any, compute_loss: ComputeLoss | None
    ) -> Profile:
        """The same profile on all ranks. Raises torch.OutOfMemoryError on all of them if memory runs out on one."""
        settings = self._settings(model, optimizer) | {"compute_loss": compute_loss, "all_sizes": self.all_sizes}
        with self._profiling(model):
            profile = profile_model(model, batch, self._config, optimizer, **settings)
        return common_profile(profile)  # once all ranks have one

    def _seen(self, batch: dict[str, Any] | None) -> dict[str, Any]:
        if batch is None:
            raise RuntimeError(self._loop.no_batch)
        return batch

    @contextmanager
    def _profiling(self, model: nn.Module) -> Iterator[None]:
        was_training = model.training
        model.train()
        try:
            guarded = end_process_if_out_of_memory() if is_sharded(model) else fail_together()
            with guarded, self._loop.profiling():
                yield
        finally:
            model.train(was_training)

    def _settings(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """What a profile is told of the run."""
        return {
            "gradient_accumulation_steps": self._loop.num_micro,
            "prefetched_batches": self._loop.num_prefetched(next(model.parameters()).device),
            "optimizer_step_bytes": self.optimizer.nbytes,
            "optimizer_state_bytes": self._coming_bytes(model, optimizer),
            "no_sync": self._no_sync(model),
        }

    def _coming_bytes(self, model: nn.Module, optimizer: Any) -> int | None:
        """State that is said to come, where nobody can know it: none, until a step is counted. None where it is known.

        After `profile_steps` steps there is state, unless the Trainer left them out (fp16 that overflows).
        """
        if optimizer is None or self.inner_steps.were_seen:
            return 0
        try:
            coming_state_bytes(optimizer, model.parameters())
        except OptimizerStateError as error:
            log.warning("Adacc: %s; until a step is counted, the plan is without it", error)
            return 0
        return None

    def _no_sync(self, model: nn.Module) -> NoSync | None:
        """What the micro-batches before a step's last one run in, where ranks hold parts of gradients."""
        return self._loop.no_sync(model) if is_sharded(model) else None

    def _is_provisional(self, profile: Profile) -> bool:
        if self._given is not None or not any(gather_from_all_ranks(self.inner_steps.were_seen)):
            return False
        return Budget.resolve(self._config.memory_budget, profile, self._config).of_peak

    def _first_policy(self, profile: Profile, is_provisional: bool) -> Policy:
        policy = self._solve(profile, self._config.memory_budget)  # raises if even the least is too much
        return least_policy(profile, self._config) if is_provisional else policy

    def _solve(self, profile: Profile, budget: float | int | str, switched_off: Collection[SwitchedOff] = ()) -> Policy:
        if callable(self._given):
            return _checked(self._given(profile), self._config.memory_budget, profile)
        allowed = without_codecs(profile, switched_off) if switched_off else profile
        allowed = allowed.without_codecs_below(self._config.min_compress_bytes)
        try:
            return solve_policy(allowed, budget, self._config)
        except InfeasibleBudgetError as error:
            if budget != "auto" or not profile.device.startswith("cuda") or has_expandable_segments():
                raise
            message = f"{as_sentence(error)} {FRAGMENTATION_HINT}"
            raise InfeasibleBudgetError(message, error.smallest_budget_bytes, error.bound_bytes) from None


def _checked(made: Any, budget: str | float | int, profile: Profile) -> Policy:
    if not isinstance(made, Policy):
        raise ValueError(f"policy=... is a function that returned {made!r}: let it return a Policy")
    refuse_above_budget(made, budget, profile.plain_stored_bytes)
    return made


def refuse_above_budget(policy: Policy, memory_budget: str | float | int, plain_bytes: float | None = None) -> None:
    """Raise ValueError for a policy, given by the user, that needs more than the budget that was given with it.

    `plain_bytes` are what plain training stores, of which a float is a fraction; None for what the policy's facts say.
    "auto", the default, is no budget that was given.
    """
    if memory_budget == "auto":
        return
    if isinstance(memory_budget, float):
        facts = dict(policy.facts)
        solved_for = facts.get("memory_budget")
        if plain_bytes is None and isinstance(solved_for, float):
            plain_bytes = facts["budget_bytes"] / solved_for
        if plain_bytes is None:
            return
        what, needed, allowed = "stores", policy.predicted_stored_bytes, math.ceil(memory_budget * plain_bytes)
    else:
        in_bytes = memory_budget if isinstance(memory_budget, int) else parse_bytes(memory_budget, "memory_budget")
        allowed = in_bytes
        what, needed = "has a peak of", policy.predicted_peak_bytes
    if needed > allowed:
        raise ValueError(
            f"memory_budget={memory_budget!r} allows {format_bytes(allowed)}, and the policy that was given beside it "
            f"{what} {format_bytes(needed)}: leave one of the two out, or give a policy that was solved for this budget"
        )


def profile_at(
    wanted: BatchShapes,
    batch: dict[str, Any],
    seen: BatchShapes,
    model: nn.Module,
    profile: Callable[[dict[str, Any]], Profile],
) -> tuple[BatchShapes, Profile] | None:
    """(sizes, profile) of `batch`, which has the sizes `seen`, made to the `wanted` ones.

    A model may take no such batch: of images of several sizes, patches and texts hang together in ways that sizes do
    not tell. Then `batch` is profiled as it is, if one policy does for it and the wanted sizes; None if not.
    """
    try:
        return wanted, profile(resized(batch, seen, wanted))
    except (torch.OutOfMemoryError, UncalledBlocksError):
        raise
    except Exception as error:
        if seen == wanted or is_sharded(model):
            raise
        log.info(
            "Adacc: the model takes no batch of %s made to %s (%s), so that one is profiled as it comes",
            *map(describe, (seen, wanted)),
            error,
        )
    if not all(gather_from_all_ranks(size_class_of(seen) == size_class_of(wanted))):
        return None
    return broadcast_from_first_rank(lambda: seen), profile(batch)
