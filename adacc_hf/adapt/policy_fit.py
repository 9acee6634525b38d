"""PolicyFit: finds a policy of the run that fits the budget at a batch size, or runs the solver, at once.

The predictions of a profile (bytes, times and errors) change during the run, because codecs and memory are measured
again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from adacc_hf.adapt.corrections import repriced_choice
from adacc_hf.adapt.outlier_tracking import full_name
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import SIZE_CLASS_RATIO, Shapes, SizeModel, joined
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.solve.simple_policies import policy_of_plans
from adacc_hf.solve.solver import recomputing_policies, solve_policy
from adacc_hf.torch_glue.batch_shapes import describe, fits_in, num_elements

if TYPE_CHECKING:
    from adacc_hf.adapt.run_state import RunState

log = logging.getLogger(__name__)

USED_UP = 0.9
"""Fraction of the budget. A policy that fits and needs at least this fraction stays. One that needs less stays until a
solver run is worth its time."""
FAR_ABOVE = 0.05
"""Fraction of the budget. The solver does not run if the policy that needed the least memory at another size exceeds
the budget by more: it would take seconds to find one that needs hardly less."""
MAX_PROFILES = 12
"""Number of recorded profiles of different sizes that are kept to predict further sizes."""
MAX_ABOVE = 64
"""Number of size classes that are remembered because no policy fits them."""
ERROR_MARGIN = 0.05
"""Fraction by which codec errors of new policies stay below `max_error`, because errors drift by a few percent."""
NOTHING_FITS = "no policy fits the budget any more"
"""Text in log messages and in the history if no policy fits the budget with the current predictions."""
SAME_ACTIONS = "the same actions, with the current outlier channels"


class PolicyFit:
    """Policies for batch sizes that were not recorded, from profiles that the recorded sizes predict.

    `policies` returns the policies that the run has now.
    """

    def __init__(self, run: RunState, policies: Callable[[], list[Policy]]) -> None:
        self._run, self._config, self._policies = run, run.config, policies
        self._profiles: list[Profile] = []
        """Recorded profiles of different sizes, the latest last."""
        self._predictor: Profile | None = None
        """Latest recorded profile that predicts other sizes."""
        self._above_budget: OrderedDict[Shapes, int] = OrderedDict()
        """Bounds of classes that no policy fits, with the version of the corrections."""
        self._least: Policy | None = None
        """Policy that needs the least memory, of the latest solver run at a size that no policy fits."""
        self.solver_ms: float | None = None
        """Time in ms of the latest solver run, or None before."""

    def add(self, profile: Profile) -> Profile:
        """Add a recorded profile. Return it with the measurements of earlier ones, so that it predicts further sizes,
        as soon as there are enough of them."""
        own = profile.measured[0][0]
        self._profiles = [other for other in self._profiles if other.measured[0][0] != own][1 - MAX_PROFILES :]
        self._profiles.append(profile)
        merged = joined(self._profiles[::-1])
        if merged.sizes is not None:
            self._predictor = merged
        return merged

    def clear(self) -> None:
        """Forget all profiles, because the model now trains other blocks, or its blocks run other operators."""
        self._profiles, self._predictor, self._least = [], None, None
        self._above_budget.clear()

    # Sizes.

    def class_of(self, shapes: Shapes) -> Shapes | None:
        """Return the size class of a batch of `shapes`, or None if no profile predicts batches of this size."""
        return None if self._predictor is None else self._sizes.size_class(shapes)

    @property
    def _sizes(self) -> SizeModel:
        """Size model of the predicting profile. Call this only if there is one."""
        assert self._predictor is not None
        sizes = self._predictor.sizes
        assert sizes is not None
        return sizes

    def predicted(self, sizes: Shapes) -> Profile:
        """Return the predicted profile of batches of `sizes`, which must belong to a size class."""
        assert self._predictor is not None
        return resize_profile(self._predictor, sizes)

    def is_larger(self, sizes: Shapes | None) -> bool:
        """Return True if batches of `sizes` are larger than each batch from which their profile is predicted."""
        return self._predictor is not None and num_elements(sizes or ()) > self._sizes.max_measured_elements

    def is_above_budget(self, sizes: Shapes) -> bool:
        """Return True if no policy fits the budget for batches of `sizes`, because none fits for smaller batches."""
        version = self._run.corrections.version
        return any(number == version and fits_in(smaller, sizes) for smaller, number in self._above_budget.items())

    # Policies.

    def for_class(self, sizes: Shapes) -> tuple[Policy, bool] | None:
        """Return (policy, may be improved) for batches of the class `sizes`, or None if no policy fits its bounds."""
        try:
            return None if self.is_above_budget(sizes) else self._fitting(self._corrected(sizes), far=0.0)
        except InfeasibleBudgetError:
            put_latest(self._above_budget, sizes, self._run.corrections.version, MAX_ABOVE)
            return None

    def for_sizes(self, sizes: Shapes) -> tuple[Policy, bool]:
        """Return (policy, may be improved) for batches of exactly `sizes`.

        If a policy fits only without room for the uncertainty of predicted peaks, or none fits, warn. Raise
        InfeasibleBudgetError if none fits and `on_over_budget` is "error".
        """
        profile = self._corrected(sizes)
        try:
            return self._fitting(profile, FAR_ABOVE)
        except InfeasibleBudgetError:
            return self._without_room(sizes, profile), False

    def _corrected(self, sizes: Shapes) -> Profile:
        return self._run.corrections.applied(self.predicted(sizes), sizes)

    def _fitting(self, profile: Profile, far: float) -> tuple[Policy, bool]:
        allowed, roomy = self._run.corrections.allowed(profile), self.with_room(profile)
        budget = Budget.resolve(roomy, profile, self._config)
        current = (suitable_policy(policy, allowed, self._config) for policy in self._policies())
        candidates = [policy for policy in current if policy is not None]
        if budget.limits_peak:  # a budget of stored bytes is solved quickly
            candidates += recomputing_policies(allowed, self._config)
        fitting = [policy for policy in candidates if budget.needed_bytes(policy) <= budget.nbytes]
        if fitting:
            fastest = min(fitting, key=lambda policy: policy.predicted_overhead_ms)
            is_final = uses_up(fastest, budget)
            if is_final or budget.limits_peak:
                return fastest, not is_final
        return self.solved(profile, roomy, far), False

    def adapted(self, profile: Profile, policy: Policy, must_fit: bool) -> tuple[Policy, str, bool]:
        """Return (policy, reason, may be improved) for batches under `policy`, whose profile is now `profile`.

        The actions stay if they are allowed and fit the budget. If no policy fits, return the one that needs the least
        memory, or raise InfeasibleBudgetError if `must_fit`.
        """
        allowed, budget = self._run.corrections.allowed(profile), self._run.budget(profile)
        disallowed = over_bound(allowed, policy, self._config)
        current = None if disallowed else current_policy(allowed, policy)
        if current is None:
            reason = f"the codec is no longer allowed for {', '.join(disallowed)}"
        elif (needed := budget.needed_bytes(current)) <= budget.nbytes:
            return current, SAME_ACTIONS, not uses_up(current, budget)
        else:
            reason = f"over budget: the old actions need {needed} bytes, {budget.nbytes} are allowed"
        try:
            return self.solved(profile, self._run.corrections.memory_budget), reason, False
        except InfeasibleBudgetError as error:
            if must_fit:
                raise
            if current is not None and isinstance(budget.setting, float):
                # Exceeding a fraction of the activations may still fit in memory.
                return policy, f"{NOTHING_FITS}, the policy is unchanged: {error}", False
            text = f"{reason}; {NOTHING_FITS}, training continues with the least memory: {error}"
            return error.least or policy, text, False

    def _without_room(self, sizes: Shapes, profile: Profile) -> Policy:
        """Return a policy within the whole budget, or the one that needs the least memory, with a warning."""
        memory_budget = self._run.corrections.memory_budget
        try:
            policy = self.solved(profile, memory_budget, FAR_ABOVE)
        except InfeasibleBudgetError as error:
            return self.least_of(sizes, error)
        text = (
            f"batches of {describe(sizes)} may take more than memory_budget={memory_budget!r}: the predicted peak of "
            f"{policy.predicted_peak_bytes} bytes is exact to {self._sizes.uncertainty:.0%} only"
        )
        log.warning("Adacc: %s", text)
        self._run.note_memory(text)
        return policy

    def least_of(self, sizes: Shapes, error: InfeasibleBudgetError) -> Policy:
        """Return the policy that needs the least memory for `sizes`, because of `error`, with a warning. Raise
        InfeasibleBudgetError if `on_over_budget` is "error"."""
        least, floor = error.least, error.smallest_budget_bytes
        assert least is not None  # the solver's errors contain this policy
        fitting = self._largest_fitting(sizes, least)
        text = f"batches of {describe(sizes)} need {floor} bytes at least"
        text += f", batches of {describe(fitting)} would fit the budget" if fitting else ""
        if self._config.on_over_budget == "error":
            raise InfeasibleBudgetError(f"{text}: {error}", floor, error.bound_bytes)
        log.warning("Adacc: %s. Training continues with the least memory: %s", text, error)
        self._run.warnings.add(sizes)
        self._run.note_memory(f"{text}: {error}")
        return least

    def _largest_fitting(self, sizes: Shapes, least: Policy) -> Shapes | None:
        """Return the largest size class with shorter sequences than `sizes` for which the policy `least` fits the
        budget, or None."""
        length = max((size[1] for _, size in sizes if len(size) > 1), default=0)
        for shorter in sorted({int(length / SIZE_CLASS_RATIO**k) for k in range(1, 16)} - {0}, reverse=True):
            cut = tuple(
                (name, tuple(max(1, n * shorter // length) if d == 1 else n for d, n in enumerate(size)))
                for name, size in sizes
            )
            size_class = self.class_of(cut)
            if size_class is None:
                return None
            profile = self._corrected(size_class)
            budget, policy = self._run.budget(profile), suitable_policy(least, profile, self._config)
            if policy is not None and budget.needed_bytes(policy) <= budget.nbytes:
                return size_class
        return None

    def solved(self, profile: Profile, memory_budget: str | float | int, far: float = FAR_ABOVE) -> Policy:
        """Run the solver, and return its policy.

        Raise InfeasibleBudgetError if no policy fits. Raise it without a solver run if the policy that needed the least
        memory at another size exceeds the budget by more than the fraction `far`.
        """
        allowed = self._run.corrections.allowed(profile)
        least = None if self._least is None else suitable_policy(self._least, allowed, self._config)
        if least is not None and self._config.on_over_budget != "error":
            budget = Budget.resolve(memory_budget, allowed, self._config)
            needed = budget.needed_bytes(least)
            if needed > (1 + far) * budget.nbytes:
                what = "peak" if budget.limits_peak else "stored bytes"
                text = f"memory_budget={budget.setting!r} is below {needed} bytes, the least {what} that is known"
                raise InfeasibleBudgetError(text, needed, bound_bytes=0, least=least)
        start = time.perf_counter()
        try:
            bound = error_bound(self._config)
            config = self._config if bound is None else self._config.with_overrides(max_error=bound)
            return solve_policy(allowed, memory_budget, config)
        except InfeasibleBudgetError as error:
            self._least = error.least
            raise
        finally:
            self.solver_ms = 1e3 * (time.perf_counter() - start)

    def with_room(self, profile: Profile) -> str | float | int:
        """Return the run's budget for `profile`, reduced by the uncertainty of predicted peaks, if there are any."""
        budget, uncertainty = self._run.budget(profile), self._sizes.uncertainty if self._predictor else 0.0
        if budget.limits_peak and uncertainty:
            return int(budget.nbytes / (1 + uncertainty))
        return self._run.corrections.memory_budget


def uses_up(policy: Policy, budget: Budget) -> bool:
    """Return True if a solver run cannot find a much faster policy within `budget`, which `policy` fits."""
    return policy.is_plain or budget.needed_bytes(policy) >= USED_UP * budget.nbytes


def suitable_policy(policy: Policy, profile: Profile, config: AdaccConfig) -> Policy | None:
    """Return `policy` with the predictions of `profile`, or None if it is not suitable.

    A policy is suitable if it was made for blocks with the operators of `profile` (on a batch of one sample, blocks may
    run other operators), uses only allowed codecs, and keeps to the limit of host memory.
    """
    plans = dict(policy.blocks)
    if plans.keys() != {block.name for block in profile.blocks}:
        return None
    pairs = [(block, policy.plans[plans[block.name]]) for block in profile.blocks]
    if any(plan.kind != profile.kinds[profile.kind_index(block, plan)].digest for block, plan in pairs):
        return None
    if over_bound(profile, policy, config):
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


def over_bound(profile: Profile, policy: Policy, config: AdaccConfig) -> list[str]:
    """Return the names of the activations for which `policy` uses a codec that is no longer allowed.

    A codec is allowed if it is an option in `profile`, and its error is at most `error_bound`.
    """
    bound = error_bound(config)
    names: dict[str, None] = {}
    for block in profile.blocks:
        plan = policy.plan_of(block.name)
        index = profile.kind_index(block, plan)
        for value, choice in plan.choices:
            options = profile.kinds[index].codec_options(value)
            if choice.codec is not None and not _may_use_codec(options, choice.codec, bound):
                names[full_name(profile, (index, value))] = None
    return list(names)


def _may_use_codec(options: tuple[CodecOption, ...], codec: str, bound: float | None) -> bool:
    """Return True if `codec` is one of `options`, with an error of at most `bound`."""
    option = next((option for option in options if option.codec == codec), None)
    return option is not None and (bound is None or option.error <= bound)


def error_bound(config: AdaccConfig) -> float | None:
    """Return the largest round-trip error of a codec that a new policy may use, or None if `max_error` is None."""
    return None if config.max_error is None else config.max_error * (1 - ERROR_MARGIN)


def distinct(policies: Iterable[Policy]) -> list[Policy]:
    """Return one of all `policies` that have the same plans, with the same outlier channels, and the same head."""
    return list({(policy.plans, policy.blocks, policy.head): policy for policy in policies}.values())
