"""Choice between the current and a newly solved policy during the run, and a search for codecs that degrade gradients.

The predictions of a profile (bytes, times and errors) change during the run, because codecs and memory are measured
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adacc_hf.adapt.outlier_tracking import full_name
from adacc_hf.adapt.profile_updates import repriced_choice
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile
from adacc_hf.artifacts.policy import Policy
from adacc_hf.solve.simple_policies import policy_of_plans
from adacc_hf.solve.solver import solve_policy

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile

MIN_GAIN = 0.02
"""Minimum reduction of the overhead for which a new policy replaces a policy that fits the budget, as a fraction of the
old policy's overhead. Predicted times vary by a few percent from one profile to the next, so a smaller reduction is
noise."""

MIN_FREED = 0.01
"""Minimum number of freed bytes for which the solver runs again, as a fraction of the bytes that the policy stores.
Bytes are freed if codecs' payloads have become smaller since the last solver run. If the available memory grows by a
fraction, the overhead falls by one to three times this fraction, so a smaller number cannot reach MIN_GAIN. A solver
run takes as long as several steps of a small model."""

HEADROOM = 0.005
"""Fraction of the budget that policies solved during a run leave free if possible. The number of outlier channels,
which codecs store uncompressed, varies by one or two. Without headroom, each new channel would exceed the budget and
start the solver."""

ERROR_MARGIN = 0.05
"""Fraction by which codec errors of new policies stay below `max_error`, because errors drift by a few percent."""

NOTHING_FITS = "no policy fits the budget any more"
"""Text in log messages and in the history if no policy fits the budget with the current predictions."""

SAME_ACTIONS = "the same actions, with the current outlier channels"


@dataclass(frozen=True, kw_only=True)
class ReplanResult:
    """Result of `replan`: the policy to follow after predictions have changed, and the reason."""

    policy: Policy | None
    """A better policy, or None if the current policy is to be kept."""
    reason: str
    has_solved: bool
    """True if the solver ran."""


def replan(
    profile: Profile,
    policy: Policy,
    memory_budget: str | float | int,
    config: AdaccConfig,
    last_solved: Profile,
    must_fit: bool = False,
) -> ReplanResult:
    """Choose between `policy` and a newly solved policy, with the current predictions of `profile`.

    The result contains the new policy, or a policy with the actions of `policy` and the current outlier channels.
    `last_solved` is the profile for which the solver ran last. If little has changed since then, the solver does not
    run. If no policy fits the budget, the result is the policy that needs the least memory, or InfeasibleBudgetError is
    raised if `must_fit`.
    """
    disallowed = over_bound(profile, policy, config)
    current = None if disallowed else current_policy(profile, policy)
    reason: str | None = f"the codec is no longer allowed for {', '.join(disallowed)}"
    if current is not None:
        reason = _excess_reason(current, Budget.resolve(memory_budget, profile, config))
        freed = freed_bytes(last_solved, profile, config)
        if reason is None and freed < MIN_FREED * current.predicted_stored_bytes:
            return _replan_result(policy, current, SAME_ACTIONS, has_solved=False)
    try:
        candidate = _solve_with_headroom(profile, memory_budget, with_margin(config))
    except InfeasibleBudgetError as error:
        if must_fit:
            raise
        if current is not None and isinstance(memory_budget, float):
            # Exceeding a fraction of the activations may still fit in memory.
            return ReplanResult(
                policy=None, reason=f"{NOTHING_FITS}, the policy is unchanged: {error}", has_solved=True
            )
        text = f"{reason}; {NOTHING_FITS}, training continues with the least memory: {error}"
        return _replan_result(policy, error.least or policy, text, has_solved=True)
    if reason is None:
        assert current is not None
        gain = current.predicted_overhead_ms - candidate.predicted_overhead_ms
        # Without the time that a faster head saves, because only the prices of blocks vary.
        now_ms = current.predicted_overhead_ms - min(0.0, profile.with_head(current.head).head_overhead_ms)
        if gain <= MIN_GAIN * now_ms:
            return _replan_result(policy, current, SAME_ACTIONS, has_solved=True)
        reason = f"saves {gain:.2f} ms of {now_ms:.2f} ms predicted overhead"
    return _replan_result(policy, candidate, reason, has_solved=True)


def _solve_with_headroom(profile: Profile, memory_budget: str | float | int, config: AdaccConfig) -> Policy:
    """Solve for the budget reduced by HEADROOM. If no policy fits the reduced budget, solve for the whole budget.

    Raises InfeasibleBudgetError if no policy fits the whole budget.
    """
    budget = Budget.resolve(memory_budget, profile, config)
    share = 1 - HEADROOM
    smaller_budget = memory_budget * share if isinstance(memory_budget, float) else int(budget.nbytes * share)
    try:
        policy = solve_policy(profile, smaller_budget, config)
    except InfeasibleBudgetError:
        return solve_policy(profile, memory_budget, config)
    budget_facts = {"memory_budget": memory_budget, "budget_bytes": budget.nbytes}
    return replace(policy, facts=tuple((dict(policy.facts) | budget_facts).items()))


def _replan_result(policy: Policy, choice: Policy, reason: str, has_solved: bool) -> ReplanResult:
    """Return the `ReplanResult` for the chosen policy `choice`. The result has no policy if `choice` equals `policy`,
    the current policy."""
    is_same = len(distinct([policy, choice])) == 1
    return ReplanResult(policy=None if is_same else choice, reason=reason, has_solved=has_solved)


def distinct(policies: Iterable[Policy]) -> list[Policy]:
    """Return one of all `policies` that have the same plans, with the same outlier channels, and the same head."""
    return list({(policy.plans, policy.blocks, policy.head): policy for policy in policies}.values())


def _excess_reason(current: Policy, budget: Budget) -> str | None:
    needed = budget.needed_bytes(current)
    if needed <= budget.nbytes:
        return None
    return f"over budget: the old actions need {needed} bytes, {budget.nbytes} are allowed"


def with_margin(config: AdaccConfig) -> AdaccConfig:
    """Return `config` with `max_error` reduced by ERROR_MARGIN, for solving new policies."""
    bound = error_bound(config)
    return config if bound is None else config.with_overrides(max_error=bound)


def error_bound(config: AdaccConfig) -> float | None:
    """Return the largest round-trip error of a codec that a new policy may use, or None if `max_error` is None."""
    return None if config.max_error is None else config.max_error * (1 - ERROR_MARGIN)


def gradient_bound(config: AdaccConfig) -> float:
    """Return the largest allowed relative error of a block's gradient under compression."""
    bound = error_bound(config)
    return DEGRADED_ERROR if bound is None else min(bound, DEGRADED_ERROR)


def freed_bytes(before: Profile, after: Profile, config: AdaccConfig) -> int:
    """Return an upper bound on the memory that is freed because codecs store fewer bytes in profile `after` than in
    `before`."""
    bound = error_bound(config)
    kinds = [_freed_by_new_codecs(b, a, bound) for b, a in zip(before.kinds, after.kinds, strict=True)]
    return sum(max(kinds[kind] for kind in after.kinds_of(block)) for block in after.blocks)


def _freed_by_new_codecs(before: KindProfile, after: KindProfile, bound: float | None) -> int:
    """Return an upper bound on the memory that one block frees because its codecs were measured to store fewer
    bytes."""
    freed = 0
    for old, new in zip(before.values, after.values, strict=True):
        old_bytes = {option.codec: option.nbytes for option in old.codecs if _is_within_error_bound(option, bound)}
        allowed = (option for option in new.codecs if _is_within_error_bound(option, bound))
        freed += max([0, *(old_bytes.get(option.codec, old.nbytes) - option.nbytes for option in allowed)])
    return freed


def _is_within_error_bound(option: CodecOption, bound: float | None) -> bool:
    return bound is None or option.error <= bound


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
    return option is not None and _is_within_error_bound(option, bound)


def num_changes(before: Policy, after: Policy) -> tuple[int, int]:
    """Count the activations of all blocks that a change of policy affects. Return (num_actions, num_channels).

    `num_actions` counts the activations whose action or codec changed. `num_channels` counts the activations with the
    same codec but other codec options, which in practice are other outlier channels.
    """
    num_actions = num_channels = 0
    for block, _ in before.blocks:
        old = dict(before.plan_of(block).choices)
        for value, choice in after.plan_of(block).choices:
            earlier = old.get(value, choice)
            is_other = (earlier.action, earlier.codec) != (choice.action, choice.codec)
            num_actions += is_other
            num_channels += not is_other and earlier.options != choice.options
    return num_actions, num_channels


# The search for codecs that degrade a gradient. Round-trip errors do not show them: queries and keys have the same
# round-trip errors as other activations, but if backward recomputes attention's softmax from them, the error of the
# gradient may exceed the gradient's norm.


def find_culprits(
    lossy: Iterable[int], bound: float, error_without: Callable[[frozenset[int]], float | None]
) -> frozenset[int] | None:
    """Return the activations in `lossy` that must stay uncompressed to keep the error of a block's gradient within
    `bound`.

    The set is minimal: if any of its activations is compressed again, the error exceeds the bound.
    `error_without(bypassed)` returns the gradient's error with the activations `bypassed` not compressed, or None if
    the error cannot be measured. The function is called at most 2 * len(lossy) + 1 times. Return None if a call returns
    None, or if the error exceeds the bound even with all of `lossy` bypassed.

    First, each activation is compressed on its own. If this alone makes the error exceed the bound, the activation is
    in the result. The other activations are then compressed together: they are added one after the other, in the order
    of the errors that they cause on their own. If the error exceeds the bound, the activation added last is left
    uncompressed, and is in the result.
    """
    everything = bypassed = frozenset(lossy)
    errors_alone: dict[int, float] = {}
    for value in sorted(everything):
        error = error_without(everything - {value})
        if error is None:
            return None
        errors_alone[value] = error
    harmless_alone = (value for value in errors_alone if errors_alone[value] <= bound)
    for value in sorted(harmless_alone, key=errors_alone.__getitem__):
        error = error_without(bypassed - {value})
        if error is None:
            return None
        bypassed -= {value} if error <= bound else set()
    if bypassed == everything:
        error = error_without(everything)
        if error is None or not error <= bound:
            return None
    return bypassed
