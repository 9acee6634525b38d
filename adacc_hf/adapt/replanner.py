"""The policy rectifier (paper, section 3.4): look at the data again now and then, re-price, re-solve.

At a tracking step the executor's own encoding counts the outlier channels of every tracked activation, chooses them
anew and measures round trips; between tracking steps nothing is counted and nothing synchronises. The solver runs on a
thread while training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from adacc_hf.adapt.gradient_check import BlockSample, GradientError, comparison_peaks, peaks_with_samples
from adacc_hf.adapt.outlier_tracking import (
    Findings,
    MeasuringCodec,
    NamedObservation,
    Observation,
    OptionKey,
    full_name,
    is_tracked,
)
from adacc_hf.adapt.policy_selection import (
    ReplanResult,
    current_policy,
    fewest,
    gradient_bound,
    judged,
    over_bound,
    with_margin,
)
from adacc_hf.adapt.profile_updates import (
    SwitchedOff,
    in_all_blocks,
    lossy_options,
    options_of,
    with_errors,
    with_finer,
    with_more_memory,
    with_outlier_counts,
    without_codecs,
)
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.solve.solver import Budget, solve_policy
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, is_first_rank, gather_from_all_ranks

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.run.policy_handle import BlockPlans

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """What one tracking step found, by activation: the most over all blocks of its kind and all ranks."""

    num_outliers: dict[str, int]
    """Outlier channels of each tracked activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error of each compressed activation."""
    gradients: dict[int, GradientError]
    """What compression cost the gradient of sampled blocks, by kind."""
    degrading: frozenset[OptionKey]
    """What of it made that too much: these codecs are not used any more."""
    reason: str
    """Why the policy must be solved again, or why not."""
    needs_solving: bool


class Replanner:
    """Keeps a policy in step with the data.

    Between steps: `start_tracking(handle.plans)` before a tracking step and `finish_tracking()` after it. If that says
    so, `start_solving()`; then, after any number of steps, `take_over()` and `handle.replace` what it returns. With
    several ranks all of them call all of these at the same steps.
    """

    def __init__(
        self, profile: Profile, policy: Policy, config: AdaccConfig, memory_budget: str | float | int | None = None
    ) -> None:
        self.profile = profile
        """Today's prices."""
        self.policy = policy
        self.priced = profile
        """The prices that `policy` was made from: those of today, or of the last tracking step but one."""
        self.searched = profile
        """The prices for which the solver ran last."""
        self.config = config
        self.memory_budget = config.memory_budget if memory_budget is None else memory_budget
        self.switched_off: frozenset[SwitchedOff] = frozenset()
        """Codecs that are not used any more, since they degraded gradients."""
        self._plans: BlockPlans | None = None
        self._findings = Findings()
        self._samples: dict[str, BlockSample] = {}
        self.num_tracked = 0
        """Tracking steps so far; the blocks whose gradients are compared go on from there."""
        self._degraded: list[str] = []
        """The blocks whose gradients were found degraded last."""
        self.lacks_room = False
        """Whether the budget had room for fewer comparisons than `guard_blocks`, at the last tracking step."""
        self.solver_ms = 0.0
        """What the solver computed for the last `take_over`, 0 on ranks that only hear of it."""
        self._solving: Background[ReplanResult] | None = None
        self._solving_from = profile

    @property
    def is_tracking(self) -> bool:
        return self._plans is not None

    @property
    def is_solving(self) -> bool:
        return self._solving is not None

    def has_work(self) -> bool:
        """Whether any activation is compressed in a way that can lose something or keeps outliers apart."""
        return bool(self.lossy_blocks())

    def lossy_blocks(self) -> list[str]:
        """Blocks that compress something with loss, in forward order."""
        lossy = [any(not c.lossless for c in _codecs(plan).values()) for plan in self.policy.plans]
        return [name for name, plan in self.policy.blocks if lossy[plan]]

    def start_tracking(self, plans: BlockPlans, every_kind: bool = False) -> None:
        """Have the next forward measure; with `every_kind` the gradient of a block of every lossy kind."""
        self._plans, self._findings = plans, Findings()
        for block in self.profile.blocks:
            plans.strategies[block.name].wrap_codec = self._measuring(block.kind)
        names = self._sampled(every_kind) if self.config.guard else []
        self._samples = {name: BlockSample(plans.strategies[name]) for name in names}
        self.num_tracked += 1

    def finish_tracking(self) -> Tracking:
        """Stop measuring, and put what was found on any rank into the prices."""
        return self.reprice(self.observed())

    def observed(self) -> NamedObservation:
        """Stop measuring; returns what was found on any rank."""
        self._stop_measuring()
        gradients, degrading = self._compare()
        observation = Observation.merged(gather_from_all_ranks(self._findings.read(gradients, degrading)))
        kinds = {kind for kind, _, _ in observation.degrading}
        degraded = [block.name for block in self.profile.blocks if block.name in self._samples and block.kind in kinds]
        self._degraded = degraded or self._degraded
        self.cancel_tracking()
        return observation.by_name(self.profile)

    def cancel_tracking(self) -> None:
        """Stop measuring and forget what was found. Harmless when nothing is measured."""
        self._stop_measuring()
        for sample in self._samples.values():
            sample.close()
        self._plans, self._findings, self._samples = None, Findings(), {}

    def predicted_peak_bytes(self) -> int:
        """Peak of the policy in force at today's prices."""
        return current_policy(self.profile, self.policy).predicted_peak_bytes

    def is_over_budget(self, peak_bytes: int) -> bool:
        """Whether the budget bounds the peak of a step, and one of `peak_bytes` is above it."""
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        return budget.of_peak and peak_bytes > budget.nbytes

    def add_memory(self, extra_bytes: int) -> None:
        """Price a step that was measured to need `extra_bytes` more than predicted."""
        self.profile = with_more_memory(self.profile, extra_bytes)

    def switch_off(self, codecs: Iterable[SwitchedOff]) -> None:
        """From the next solving on, none of `codecs`, and perhaps a finer one in place of each."""
        self.switched_off |= frozenset(codecs)
        if self.switched_off:
            self.profile = with_finer(self.profile, self.switched_off, self.config)

    def solve_for(self, profile: Profile) -> Policy:
        """The policy for the prices of `profile`, today's from now on; on all ranks what the first one solves.

        It is the policy from now on. Raises InfeasibleBudgetError, and leaves the policy as it is.
        """
        self.profile = profile
        budget, config = self.memory_budget, with_margin(self.config)
        self.policy = broadcast_from_first_rank(lambda: solve_policy(self._to_solve(), budget, config))
        self.priced = self.searched = profile
        return self.policy

    def start_solving(self) -> None:
        """Solve for today's prices on a thread of the first rank."""
        profile, policy, budget = self._to_solve(), self.policy, self.memory_budget
        searched = self.searched.without_codecs_below(self.config.min_compress_bytes)
        self._solving_from = self.profile
        self._solving = Background(lambda: judged(profile, policy, budget, self.config, searched))

    def take_over(self) -> ReplanResult:
        """What was solved, which is the policy from now on. Waits for the solver and raises its errors."""
        assert self._solving is not None, "start_solving comes first"
        found = self._solving.result()
        self.solver_ms, self._solving = self._solving.cpu_ms, None
        if found.searched:
            self.searched = self._solving_from
        if found.policy is not None:
            self.policy, self.priced = found.policy, self._solving_from
        return found

    def solve_within(self, memory_budget: str | float | int) -> Policy:
        """The policy for another budget, which is the policy from now on. Raises InfeasibleBudgetError.

        What is being solved for the budget until now is given up.
        """
        self.policy = solve_policy(self._to_solve(), memory_budget, with_margin(self.config))
        self._solving = None
        self.memory_budget, self.priced, self.searched = memory_budget, self.profile, self.profile
        return self.policy

    def _to_solve(self) -> Profile:
        # An estimated profile prices codecs for what is large enough at some size.
        allowed = without_codecs(self.profile, self.switched_off)
        return allowed.without_codecs_below(self.config.min_compress_bytes)

    def _measuring(self, kind_index: int) -> Callable[[int, Codec], MeasuringCodec]:
        values = self.profile.kinds[kind_index].values

        def wrap(value: int, codec: Codec) -> MeasuringCodec:
            tracks = is_tracked(values[value], self.config)
            key, options = (kind_index, value), values[value].codecs
            return MeasuringCodec(codec, key, options, self.config, self._findings, tracks)

        return wrap

    def _stop_measuring(self) -> None:
        for strategy in self._plans.strategies.values() if self._plans is not None else ():
            strategy.wrap_codec = None

    def _sampled(self, every_kind: bool) -> list[str]:
        """Blocks whose gradients are compared: some in turn, or a lossy one of every kind.

        In turn those for which the budget has room. Of every kind, room or not, the one that was found degraded last,
        or the first one, which takes least.
        """
        names = self.lossy_blocks()
        if every_kind:
            kinds = {block.name: block.kind for block in self.profile.blocks}
            suspects = [name for name in self._degraded if name in names]
            return list({kinds[name]: name for name in reversed([*suspects, *names])}.values())
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        if budget.of_peak:
            peaks = peaks_with_samples(self.profile, current_policy(self.profile, self.policy))
            after = comparison_peaks(self.profile)
            fitting = [name for name in names if max(peaks[name], after[name]) <= budget.nbytes]
            self.lacks_room = min(self.config.guard_blocks, len(names)) > len(fitting)
            names = fitting
        num = min(self.config.guard_blocks, len(names))
        return [names[(self.num_tracked * num + place) % len(names)] for place in range(num)]

    def _compare(self) -> tuple[dict[int, GradientError], frozenset[OptionKey]]:
        """Gradient errors by kind, and the codecs that must not be used any more for them to keep to the bound.

        All ranks search together, as they may have to: a block that exchanges something runs on all of them or none.
        """
        bound = gradient_bound(self.config)
        kinds = {block.name: block.kind for block in self.profile.blocks}
        found: dict[int, list[GradientError]] = {}
        degrading: set[OptionKey] = set()
        for name, sample in self._samples.items():
            error = sample.compare()
            if error is not None:
                found.setdefault(kinds[name], []).append(error)
            if any(gather_from_all_ranks(error is not None and error.error > bound)):
                degrading |= self._degrading(name, kinds[name], sample, was_compared=error is not None)
            sample.close()  # one exact gradient at a time
        return {kind: GradientError.worst(errors) for kind, errors in found.items()}, frozenset(degrading)

    def _degrading(self, name: str, kind: int, sample: BlockSample, was_compared: bool) -> frozenset[OptionKey]:
        """The codecs of the block `name` without which its gradient is mended: all where that cannot be found.

        Those that are switched off already, and in force until another policy is, are taken for granted.
        """
        bound = gradient_bound(self.config)
        lossy = {value: codec.name for value, codec in _codecs(self.policy.plan_of(name)).items() if not codec.lossless}
        gone = options_of(self.profile, self.switched_off)
        known = frozenset(value for value, codec in lossy.items() if (kind, value, codec) in gone)

        def error_without(values: frozenset[int]) -> float | None:
            found = sample.compare(known | values)
            without_gradient = None if was_compared else 0.0  # a rank that never had one agrees with the others
            errors = gather_from_all_ranks(without_gradient if found is None else found.error)
            told = [error for error in errors if error is not None]
            return max(told) if len(told) == len(errors) else None

        before = error_without(frozenset()) if known else None
        is_explained = before is not None and before <= bound
        values = known if is_explained else fewest(lossy.keys() - known, bound, error_without)
        if values is None:
            log.warning(
                "Adacc: what degrades the gradient of %s cannot be told: lossy compression ends for all blocks like it",
                name,
            )
            return lossy_options(self.profile, [name])
        return frozenset((kind, value, lossy[value]) for value in known | values)

    def reprice(self, observed: NamedObservation) -> Tracking:
        """Put what was found into the prices: under this policy, or under that of the same blocks at another size."""
        before = self.profile
        found = observed.within(before)
        repriced = with_outlier_counts(before, found.num_outliers)
        channels_moved = repriced != before
        self.profile = with_errors(repriced, found.option_errors)
        self.switch_off(in_all_blocks(before, found.degrading))
        over = over_bound(self._to_solve(), self.policy, self.config)
        if channels_moved:
            reason = "the number of outliers changed"
        elif over:
            reason = f"errors above the bound: {', '.join(over)}"
        else:
            reason = "outliers as before"
        return Tracking(
            num_outliers={full_name(before, key): count for key, count in found.num_outliers.items()},
            errors={full_name(before, key): error for key, error in found.errors.items()},
            gradients=found.gradients,
            degrading=found.degrading,
            reason=reason,
            needs_solving=channels_moved or bool(over),
        )


def _codecs(plan: Plan) -> dict[int, Codec]:
    return {
        value: get_codec(choice.codec, **dict(choice.options))
        for value, choice in plan.choices
        if choice.action is Action.COMPRESS and choice.codec is not None
    }


# One function at a time on a thread of its own, on the first rank.

T = TypeVar("T")


class Background(Generic[T]):
    """The result of `make`, which starts at once on the first rank.

    All ranks must ask for the result at the same point.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.cpu_ms = 0.0
        """What `make` computed, which training may have had to wait for; known on the first rank once it is done."""
        self._make = make
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if is_first_rank():
            self._thread = threading.Thread(target=self._run, name="adacc-solver")
            self._thread.start()

    def result(self) -> T:
        """What `make` returned, on every rank; waits for it. Its error is raised everywhere."""
        return broadcast_from_first_rank(self._joined)

    def _run(self) -> None:
        started = time.thread_time()
        try:
            self._made.append(self._make())
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        self.cpu_ms = (time.thread_time() - started) * 1e3

    def _joined(self) -> Any:
        assert self._thread is not None, "only the first rank makes"
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made[0]
