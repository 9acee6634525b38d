"""PolicyFit: finds a policy of the run that fits the budget at a batch size, or runs the solver, at once.

The predictions of a profile (bytes, times and errors) change during the run, because codecs and memory are measured
again. `first_policy` makes the policy of the run's first profile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from adacc_hf.adapt.corrections import repriced_choice
from adacc_hf.adapt.policy_checks import refuse_policy
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError, as_sentence
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes, SizeModel, joined
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.solve.simple_policies import policy_of_plans
from adacc_hf.solve.solver import least_policy, recomputing_policies, solve_policy
from adacc_hf.torch_glue.batch_shapes import describe, num_elements
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks
from adacc_hf.torch_glue.memory import FRAGMENTATION_HINT, has_expandable_segments
from adacc_hf.torch_glue.progress import reported_if_slow

log = logging.getLogger(__name__)

USED_UP = 0.9
"""Fraction of the budget. A policy that fits and needs at least this fraction stays. One that needs less stays until a
solver run is worth its time."""
MAX_PROFILES = 12
"""Number of recorded profiles of different sizes that are kept to predict further sizes."""
ERROR_MARGIN = 0.05
"""Fraction by which codec errors of new policies stay below `max_error`, because errors drift by a few percent."""


class PolicyFit:
    """Policies that fit a profile: a policy that the run has, or a solver run. Predicts profiles of further sizes."""

    def __init__(self, run: RunState) -> None:
        self._run, self._config = run, run.config
        self._profiles: list[Profile] = []
        """Recorded profiles of different sizes, the latest last."""
        self.predictor: Profile | None = None
        """Latest recorded profile that predicts other sizes."""

    def add(self, profile: Profile) -> Profile:
        """Add a recorded profile. Return it with the measurements of earlier ones, so that it predicts further sizes,
        as soon as there are enough of them."""
        own = profile.measured[0][0]
        self._profiles = [other for other in self._profiles if other.measured[0][0] != own][1 - MAX_PROFILES :]
        self._profiles.append(profile)
        merged = joined(self._profiles[::-1])
        if merged.sizes is not None:
            self.predictor = self._run.size_predictor = merged
        return merged

    def class_of(self, shapes: Shapes) -> Shapes | None:
        """Return the size class of a batch of `shapes`, or None if no profile predicts batches of this size."""
        return None if self.predictor is None else self._sizes.size_class(shapes)

    @property
    def _sizes(self) -> SizeModel:
        """Size model of the predicting profile. Call this only if there is one."""
        assert self.predictor is not None
        sizes = self.predictor.sizes
        assert sizes is not None
        return sizes

    def predicted(self, sizes: Shapes) -> Profile:
        """Return the predicted profile of batches of `sizes`, which must belong to a size class."""
        assert self.predictor is not None
        return resize_profile(self.predictor, sizes)

    def is_larger(self, sizes: Shapes | None) -> bool:
        """Return True if batches of `sizes` are larger than each batch from which their profile is predicted."""
        return self.predictor is not None and num_elements(sizes or ()) > self._sizes.max_measured_elements

    def fitting(self, profile: Profile, policies: Iterable[Policy]) -> tuple[Policy, bool]:
        """Return (policy, may be improved) for `profile`, with room for the uncertainty of predicted peaks: one of the
        run's `policies`, or full recomputation, or a new one. Raise InfeasibleBudgetError if none fits."""
        budget = Budget.resolve(self.with_room(profile), profile, self._config)
        if budget.limits_peak:  # a budget of stored bytes is solved quickly
            policies = [*policies, *recomputing_policies(profile, self._config)]
        policy, is_new = self.fastest(profile, policies, budget, is_final=not budget.limits_peak)
        return policy, not is_new and not uses_up(policy, budget)

    def least(self, profile: Profile, sizes: Shapes, error: InfeasibleBudgetError) -> Policy:
        """Return the policy that needs the least memory for batches of `sizes`, because of `error`, with a warning.
        Raise InfeasibleBudgetError if it exceeds the budget, and `on_over_budget` is "error"."""
        least, budget = error.least, self._run.budget(profile)
        assert least is not None  # the solver's errors contain this policy
        text = f"batches of {describe(sizes)} need {error.smallest_budget_bytes} bytes at least"
        if budget.needed_bytes(least) <= budget.nbytes:
            text += f", and this prediction is exact to {self._sizes.uncertainty:.0%} only"
        elif self._config.on_over_budget == "error":
            raise InfeasibleBudgetError(f"{text}: {error}", error.smallest_budget_bytes, error.bound_bytes)
        self._run.warn_of_memory(f"{text}. Training continues with the least memory: {error}")
        return least

    def corrected(self, sizes: Shapes) -> Profile:
        """Return the predicted profile of batches of `sizes` with the run's corrections."""
        return self._run.corrections.applied(self.predicted(sizes), sizes)

    def fastest(
        self, profile: Profile, policies: Iterable[Policy], budget: Budget, is_final: bool
    ) -> tuple[Policy, bool]:
        """Return (policy, is new): the fastest of `policies` that suits `profile` and fits `budget`. If there is none,
        or if a solver run may find a faster one and the policy `is_final`, return a new policy."""
        suitable = (suitable_policy(policy, profile, self._config) for policy in policies)
        fitting = (policy for policy in suitable if policy and budget.needed_bytes(policy) <= budget.nbytes)
        fastest = min(fitting, key=lambda policy: policy.predicted_overhead_ms, default=None)
        if fastest is None or (is_final and not uses_up(fastest, budget)):
            return self.solved(profile, budget.setting), True
        return fastest, False

    def solved(self, profile: Profile, memory_budget: str | float | int) -> Policy:
        """Run the solver, and return its policy. Raise InfeasibleBudgetError if no policy fits."""
        bound = error_bound(self._config)
        config = self._config if bound is None else self._config.with_overrides(max_error=bound)
        return solve_policy(profile, memory_budget, config)

    def with_room(self, profile: Profile) -> str | float | int:
        """Return the run's budget for `profile`, reduced by the uncertainty of predicted peaks, if there are any."""
        budget, uncertainty = self._run.budget(profile), self._sizes.uncertainty if self.predictor else 0.0
        if budget.limits_peak and uncertainty:
            return int(budget.nbytes / (1 + uncertainty))
        return self._run.corrections.memory_budget


def first_policy(run: RunState, profile: Profile, saved: Sequence[Policy] = ()) -> Policy:
    """Return the policy for the run's first profile, from the user's function or the solver. The result is the same on
    all ranks.

    `profile` includes the corrections of a resumed run, and one of the `saved` policies of its checkpoint is used if
    it fits well. If the budget limits the peak and an optimizer steps within backward, no profile predicts the peak:
    the policy that needs the least memory is used. Raises InfeasibleBudgetError if no policy fits the budget, except
    in a run that begins again.
    """
    config, source, budget = run.config, run.source, run.budget(profile)
    _warn_of_fragments(profile, budget)
    has_inner_steps = any(gather_from_all_ranks(run.profiler.has_inner_steps))

    def solve() -> Policy:
        if callable(source):
            policy = source(profile)
            if not isinstance(policy, Policy):
                raise ValueError(f"policy=... is a function that returned {policy!r}: let it return a Policy")
            refuse_policy(policy, config, config.host_limit(profile.host_free_bytes), profile.plain_stored_bytes)
            return policy
        try:
            policy, _ = PolicyFit(run).fastest(profile, saved, budget, is_final=True)
        except InfeasibleBudgetError as error:
            if run.policy is None or config.on_over_budget != "warn" or error.least is None:
                raise _with_hints(error, run, profile) from None
            run.warn_of_memory(f"no policy fits the new profile. Training continues with the least memory: {error}")
            policy = error.least
        return least_policy(profile, config) if has_inner_steps and budget.limits_peak else policy

    with reported_if_slow("solving for the first policy"):
        return broadcast_from_first_rank(solve)


def _with_hints(error: InfeasibleBudgetError, run: RunState, profile: Profile) -> InfeasibleBudgetError:
    message, budget = as_sentence(error), run.corrections.memory_budget
    if not isinstance(budget, float) and not run.profiler.counted_state_bytes:
        message += " State that the optimizer creates in its first step comes on top."
    if budget == "auto" and profile.device.startswith("cuda") and not has_expandable_segments():
        message += f" {FRAGMENTATION_HINT}"
    return InfeasibleBudgetError(message, error.smallest_budget_bytes, error.bound_bytes, error.least)


def _warn_of_fragments(profile: Profile, budget: Budget) -> None:
    """Warn, before the first step, of a budget that fragmentation of the GPU's memory leaves no room for."""
    is_larger = budget.limits_peak and budget.setting != "auto" and budget.nbytes > profile.available_bytes
    if is_larger and profile.device.startswith("cuda") and not has_expandable_segments():
        log.warning(
            "Adacc: memory_budget=%r is more than the %s of the GPU that remain after fragmentation: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training, or a budget of at most that",
            budget.setting,
            format_bytes(profile.available_bytes),
        )


def uses_up(policy: Policy, budget: Budget) -> bool:
    """Return True if a solver run cannot find a much faster policy within `budget`, which `policy` fits."""
    return policy.is_plain or budget.needed_bytes(policy) >= USED_UP * budget.nbytes


def suitable_policy(policy: Policy, profile: Profile, config: AdaccConfig) -> Policy | None:
    """Return `policy` with the predictions of `profile`, or None if it was made for blocks with other operators (as on
    a batch of one sample), uses codecs that are not allowed, or exceeds the limit of host memory."""
    plans = dict(policy.blocks)
    if plans.keys() != {block.name for block in profile.blocks}:
        return None
    pairs = [(block, policy.plans[plans[block.name]]) for block in profile.blocks]
    if any(plan.kind != profile.kinds[profile.kind_index(block, plan)].digest for block, plan in pairs):
        return None
    if not allows(profile, policy, config):
        return None
    current = current_policy(profile, policy)
    return current if current.predicted_host_bytes <= config.host_limit(profile.host_free_bytes) else None


def current_policy(profile: Profile, policy: Policy) -> Policy:
    """Return a copy of `policy` with the same actions, and with the outlier channels and predictions of `profile`."""
    plans = []
    for block in profile.blocks:
        plan = policy.plan_of(block.name)
        kind = profile.kinds[profile.kind_index(block, plan)]
        choices = tuple((v, repriced_choice(kind, v, choice)) for v, choice in plan.choices)
        plans.append(replace(plan, choices=choices))
    facts = dict(policy.facts)
    if "plain_stored_bytes" in facts:
        facts["plain_stored_bytes"] = profile.plain_stored_bytes
    return policy_of_plans(profile.with_head(policy.head), plans, facts)


def allows(profile: Profile, policy: Policy, config: AdaccConfig) -> bool:
    """Return True if `policy` uses only codecs that are options in `profile`, with errors within `error_bound`."""
    bound = error_bound(config)
    for block in profile.blocks:
        plan = policy.plan_of(block.name)
        kind = profile.kinds[profile.kind_index(block, plan)]
        for value, choice in plan.choices:
            options = [option for option in kind.codec_options(value) if option.codec == choice.codec]
            if choice.codec is not None and not any(bound is None or option.error <= bound for option in options):
                return False
    return True


def error_bound(config: AdaccConfig) -> float | None:
    """Return the largest round-trip error of a codec that a new policy may use, or None if `max_error` is None."""
    return None if config.max_error is None else config.max_error * (1 - ERROR_MARGIN)


def distinct(policies: Iterable[Policy]) -> list[Policy]:
    """Return one of all `policies` that have the same plans, with the same outlier channels, and the same head."""
    return list({(policy.plans, policy.blocks, policy.head): policy for policy in policies}.values())
