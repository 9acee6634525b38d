"""Replanner: updates a profile's predictions during the run, and solves again (the paper's rectifier, section 3.4).

The predictions of a profile are bytes, times and errors. At a tracking step, the codecs count the outlier channels of
the activations that they encode, choose the channels to store as outliers, and measure round-trip errors. Other steps
make no measurements, and do not synchronize with the device. The solver runs on a thread while training continues.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from adacc_hf.adapt.gradient_check import BlockSample, GradientError, comparison_peaks, peaks_with_samples
from adacc_hf.adapt.outlier_tracking import (
    Measurements,
    MeasuringCodec,
    Observation,
    OptionKey,
    full_name,
)
from adacc_hf.adapt.policy_selection import (
    ReplanResult,
    current_policy,
    find_culprits,
    gradient_bound,
    over_bound,
    replan,
    with_margin,
)
from adacc_hf.adapt.profile_updates import (
    SwitchedOff,
    in_all_blocks,
    lossy_options,
    switched_off_options,
    with_errors,
    with_finer,
    with_more_memory,
    with_outlier_counts,
    with_static_memory,
    without_codecs,
)
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.kernels._host_names import encoding_of
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.solve.solver import Budget, solve_policy
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks, is_first_rank

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.run.policy_handle import BlockPlans

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Measurements of one tracking step by activation: maxima over all blocks of a kind (blocks that run the same
    operators) and over all ranks."""

    num_outliers: dict[str, int]
    """Number of outlier channels of each tracked activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error of each compressed activation."""
    gradients: dict[int, GradientError]
    """Error of the gradients of sampled blocks under compression, by index of the kind of block."""
    degrading_codecs: frozenset[OptionKey]
    """Codecs to switch off, because with them the error of a block's gradient exceeds the allowed bound."""
    reason: str
    """Text that explains the value of `needs_solving`."""
    needs_solving: bool
    """True if the solver has to be run again for the changed predictions."""


class Replanner:
    """A run's policy and its profile, with methods that adapt both to the data while training.

    Call `start_tracking(handle.plans)` before a tracking step, and `observed()` and `reprice` after it. If the
    result's `needs_solving` is True, call `start_solving()`. After any number of further steps, call `take_over()`, and
    pass the policy in the result of `take_over`, unless None, to `handle.replace`. All ranks have to make these calls
    at the same steps.
    """

    def __init__(
        self, profile: Profile, policy: Policy, config: AdaccConfig, memory_budget: str | float | int | None = None
    ) -> None:
        self.profile = profile
        """Profile with the current predictions."""
        self.policy = policy
        self.priced = profile
        """Profile from which `policy` was made. The predictions in this profile may be older than the predictions in
        `profile`."""
        self.searched = profile
        """Profile for which the solver ran last."""
        self.config = config
        self.memory_budget = config.memory_budget if memory_budget is None else memory_budget
        self.switched_off: frozenset[SwitchedOff] = frozenset()
        """Codecs that new policies must not use, because these codecs degraded gradients."""
        self._plans: BlockPlans | None = None
        self._measurements = Measurements()
        self._samples: dict[str, BlockSample] = {}
        self.num_tracked = 0
        """Number of tracking steps so far. The number decides which blocks are sampled next."""
        self._degraded_blocks: list[str] = []
        """Sampled blocks with degraded gradients, at the latest tracking step that found a degraded gradient."""
        self.lacks_room = False
        """True if, at the latest tracking step, no gradient was compared, because the budget had no room."""
        self._has_said_unmeasured = False
        self.solver_ms = 0.0
        """CPU time in ms of the solver run whose result `take_over` returned last, or 0 on ranks that do not solve."""
        self._solver: Background[ReplanResult] | None = None
        self._solver_profile = profile
        """Profile that the running solver was started with."""

    @property
    def is_tracking(self) -> bool:
        return self._plans is not None

    def has_work(self) -> bool:
        """Return True if the policy uses lossy codecs. Without lossy codecs, nothing needs to be tracked."""
        return bool(self.lossy_blocks())

    def lossy_blocks(self) -> list[str]:
        """Return the names of the blocks in which the policy uses lossy codecs, in forward order."""
        lossy = [any(not c.lossless for c in _codecs(plan).values()) for plan in self.policy.plans]
        return [name for name, plan in self.policy.blocks if lossy[plan]]

    def start_tracking(self, plans: BlockPlans, every_kind: bool = False) -> None:
        """Begin the measurements of a tracking step, in which the blocks follow `plans`.

        If `every_kind` is True, gradients are compared in one block of each kind that uses lossy codecs. A kind is a
        group of blocks that run the same operators.
        """
        self._plans, self._measurements = plans, Measurements()
        room = self._forward_room()
        for name, kind in self._kinds.items():
            plans.strategies[name].wrap_codec = self._codec_wrapper(kind, room[name])
        self._samples = {name: BlockSample(plans.strategies[name]) for name in self._sample_names(every_kind)}
        self.num_tracked += 1

    def observed(self) -> Observation:
        """End the tracking step, and compare the gradients of the sampled blocks. Return the merged measurements of all
        ranks."""
        self._stop_measuring()
        gradients, degrading_codecs = self._compare_gradients()
        self._say_unmeasured()
        own_observation = self._measurements.read(gradients, degrading_codecs)
        observation = Observation.merged(gather_from_all_ranks(own_observation))
        kinds = {kind for kind, _, _ in observation.degrading_codecs}
        degraded = [name for name, kind in self._kinds.items() if name in self._samples and kind in kinds]
        self._degraded_blocks = degraded or self._degraded_blocks
        self.cancel_tracking()
        return observation.by_name(self.profile)

    def _say_unmeasured(self) -> None:
        """Log once which round-trip errors the budget had no room to measure in any block of a kind (blocks that run
        the same operators)."""
        unmeasured = self._measurements.unmeasured - self._measurements.errors.keys()
        if unmeasured and not self._has_said_unmeasured:
            self._has_said_unmeasured = True
            names = ", ".join(full_name(self.profile, key) for key in sorted(unmeasured))
            log.info("Adacc: the budget has no room to measure the round-trip errors of %s", names)

    def cancel_tracking(self) -> None:
        """End the tracking step without a result. Do nothing outside tracking steps."""
        self._stop_measuring()
        for sample in self._samples.values():
            sample.close()
        self._plans, self._measurements, self._samples = None, Measurements(), {}

    def predicted_peak_bytes(self) -> int:
        """Return the peak memory of a step under the policy, as currently predicted."""
        return current_policy(self.profile, self.policy).predicted_peak_bytes

    def is_over_budget(self, peak_bytes: int) -> bool:
        """Return True if `peak_bytes` exceeds the budget. Always False if the budget is for stored bytes only."""
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        return budget.limits_peak and peak_bytes > budget.nbytes

    def add_memory(self, extra_bytes: int) -> None:
        """Add `extra_bytes` to the predicted memory of a step, because a measured step exceeded the prediction by this
        number."""
        self.profile = with_more_memory(self.profile, extra_bytes)

    def add_static(self, extra_bytes: int) -> None:
        """Count `extra_bytes` more bytes as live throughout training, for the current and the next policies."""
        profiles = {id(profile): profile for profile in (self.profile, self.priced, self.searched)}
        larger = {key: with_static_memory(profile, extra_bytes) for key, profile in profiles.items()}
        self.profile, self.priced, self.searched = (larger[id(p)] for p in (self.profile, self.priced, self.searched))
        self.policy = current_policy(self.priced, self.policy)

    def switch_off(self, codecs: Iterable[SwitchedOff]) -> None:
        """Exclude `codecs` from new policies.

        If the config names no codecs, new policies may use the precise codec (INT8) for the activations that lost a
        codec.
        """
        self.switched_off |= frozenset(codecs)
        if self.switched_off:
            self.profile = with_finer(self.profile, self.switched_off, self.config)

    def solve_for(self, profile: Profile) -> Policy:
        """Replace the current profile by `profile`, run the solver, and set and return the new policy.

        The first rank solves for all ranks. If no policy fits the budget, the old policy remains, and
        InfeasibleBudgetError is raised.
        """
        self.profile = profile
        budget, config = self.memory_budget, with_margin(self.config)
        self.policy = broadcast_from_first_rank(lambda: solve_policy(self._allowed_profile(), budget, config))
        self.priced = self.searched = profile
        return self.policy

    def adopt(self, policy: Policy) -> None:
        """Make `policy`, which was solved for the current profile, the current policy."""
        self.policy = policy
        self.priced = self.searched = self.profile

    def start_solving(self) -> None:
        """Start the solver for the current profile, on a thread of the first rank."""
        profile, policy, budget = self._allowed_profile(), self.policy, self.memory_budget
        last_solved = self.searched.without_codecs_below(self.config.min_compress_bytes)
        self._solver_profile = self.profile
        self._solver = Background(lambda: replan(profile, policy, budget, self.config, last_solved))

    def take_over(self) -> ReplanResult:
        """Wait for the solver that `start_solving` started, and return its result. Errors of the solver are raised.

        If the result contains a policy, this policy becomes the current policy.
        """
        assert self._solver is not None, "call start_solving first"
        result = self._solver.result()
        self.solver_ms, self._solver = self._solver.cpu_ms, None
        if result.has_solved:
            self.searched = self._solver_profile
        if result.policy is not None:
            self.policy, self.priced = result.policy, self._solver_profile
        return result

    def solve_within(self, memory_budget: str | float | int) -> Policy:
        """Set the budget to `memory_budget`, run the solver, and set and return the new policy.

        The result of a solver that is running for the old budget is ignored. If no policy fits the new budget, the old
        policy and budget remain, and InfeasibleBudgetError is raised.
        """
        self.policy = solve_policy(self._allowed_profile(), memory_budget, with_margin(self.config))
        self._solver = None
        self.memory_budget, self.priced, self.searched = memory_budget, self.profile, self.profile
        return self.policy

    def _allowed_profile(self) -> Profile:
        # An estimated profile has codecs for every value that reaches min_compress_bytes at some batch size.
        allowed = without_codecs(self.profile, self.switched_off)
        return allowed.without_codecs_below(self.config.min_compress_bytes)

    def _forward_room(self) -> dict[str, float]:
        """Return the bytes of the budget that are free in the forward of each block, by the block's name."""
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        room = {block.name: math.inf for block in self.profile.blocks}
        if not budget.limits_peak:
            return room
        names = {f"forward {name}": name for name in room}
        for label, live in simulate_policy(self.profile, current_policy(self.profile, self.policy)).timeline:
            if label in names:
                room[names[label]] = min(room[names[label]], budget.nbytes - live)
        return room

    def _codec_wrapper(self, kind_index: int, room_bytes: float) -> Callable[[int, Codec], MeasuringCodec]:
        values = self.profile.kinds[kind_index].values

        def wrap(value: int, codec: Codec) -> MeasuringCodec:
            key, options = (kind_index, value), values[value].codecs
            return MeasuringCodec(codec, key, options, self.config, self._measurements, room_bytes)

        return wrap

    def _stop_measuring(self) -> None:
        for strategy in self._plans.strategies.values() if self._plans is not None else ():
            strategy.wrap_codec = None

    @property
    def _kinds(self) -> dict[str, int]:
        """Dict from each block's name to the index of the kind of block (`Profile.kinds`) that the block belongs to
        under the policy."""
        blocks = self.profile.blocks
        return {block.name: self.profile.kind_index(block, self.policy.plan_of(block.name)) for block in blocks}

    def _sample_names(self, every_kind: bool) -> list[str]:
        """Return the names of the blocks whose gradients are compared: if `every_kind`, the block of each lossy kind
        that was degraded last, or its first one; else one lossy block in turn, or none if the budget has no room. A
        comparison runs the block twice, and twice more for each compressed activation of a gradient above its limit."""
        names = self.lossy_blocks()
        if every_kind:
            kinds = self._kinds
            suspects = [name for name in self._degraded_blocks if name in names]
            return list({kinds[name]: name for name in reversed([*suspects, *names])}.values())
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        if budget.limits_peak:
            peaks = peaks_with_samples(self.profile, current_policy(self.profile, self.policy))
            after = comparison_peaks(self.profile)
            fitting = [name for name in names if max(peaks[name], after[name]) <= budget.nbytes]
            self.lacks_room = bool(names) and not fitting
            names = fitting
        return [names[self.num_tracked % len(names)]] if names else []

    def _compare_gradients(self) -> tuple[dict[int, GradientError], frozenset[OptionKey]]:
        """Return (gradient errors by index of the kind, codecs to switch off until the errors are within
        `gradient_bound`). If an error is above it on one rank, all ranks search, because collectives in a block need
        all ranks."""
        bound = gradient_bound(self.config)
        kinds = self._kinds
        errors_by_kind: dict[int, list[GradientError]] = {}
        degrading_codecs: set[OptionKey] = set()
        for name, sample in self._samples.items():
            error = sample.compare()
            if error is not None:
                errors_by_kind.setdefault(kinds[name], []).append(error)
            if any(gather_from_all_ranks(error is not None and error.error > bound)):
                degrading_codecs |= self._find_degrading(name, kinds[name], sample, was_compared=error is not None)
            sample.close()  # so that only one exact gradient is held at a time
        worst_errors = {kind: GradientError.worst(errors) for kind, errors in errors_by_kind.items()}
        return worst_errors, frozenset(degrading_codecs)

    def _find_degrading(self, name: str, kind: int, sample: BlockSample, was_compared: bool) -> frozenset[OptionKey]:
        """Return the codecs without which the gradient error of block `name` is at most `gradient_bound`, those
        switched off already included while the policy uses them. If the search fails, warn and return all lossy codecs
        of the kind. `was_compared` is True if this rank could compare the gradient."""
        bound = gradient_bound(self.config)
        lossy = {
            value: encoding_of(codec.name)
            for value, codec in _codecs(self.policy.plan_of(name)).items()
            if not codec.lossless
        }
        off_options = switched_off_options(self.profile, self.switched_off)
        off_values = frozenset(value for value, codec in lossy.items() if (kind, value, codec) in off_options)

        def error_without(values: frozenset[int]) -> float | None:
            error = sample.compare(off_values | values)
            default = None if was_compared else 0.0  # 0.0: a rank without the sample adopts the other ranks' result
            rank_errors = gather_from_all_ranks(default if error is None else error.error)
            measured_errors = [rank_error for rank_error in rank_errors if rank_error is not None]
            return max(measured_errors) if len(measured_errors) == len(rank_errors) else None

        error_without_off = error_without(frozenset()) if off_values else None
        is_explained = error_without_off is not None and error_without_off <= bound
        values = off_values if is_explained else find_culprits(lossy.keys() - off_values, bound, error_without)
        if values is None:
            log.warning(
                "Adacc: the codecs that degrade the gradient of %s cannot be determined: lossy compression is switched "
                "off for all blocks of its kind",
                name,
            )
            return lossy_options(self.profile, [name])
        return frozenset((kind, value, lossy[value]) for value in off_values | values)

    def reprice(self, observed: Observation) -> Tracking:
        """Update the profile's predictions from the measurements `observed`, which may come from another batch size."""
        before = self.profile
        observation = observed.for_profile(before)
        repriced = with_outlier_counts(before, observation.num_outliers)
        has_changed_counts = repriced != before
        self.profile = with_errors(repriced, observation.option_errors)
        self.switch_off(in_all_blocks(before, observation.degrading_codecs))
        disallowed = over_bound(self._allowed_profile(), self.policy, self.config)
        if has_changed_counts:
            reason = "the number of outlier channels changed"
        elif disallowed:
            reason = f"errors above the bound: {', '.join(disallowed)}"
        else:
            reason = "outlier channels unchanged, errors within the bound"
        return Tracking(
            num_outliers={full_name(before, key): count for key, count in observation.num_outliers.items()},
            errors={full_name(before, key): error for key, error in observation.errors.items()},
            gradients=observation.gradients,
            degrading_codecs=observation.degrading_codecs,
            reason=reason,
            needs_solving=has_changed_counts or bool(disallowed),
        )


def _codecs(plan: Plan) -> dict[int, Codec]:
    return {
        value: get_codec(choice.codec, **dict(choice.options))
        for value, choice in plan.choices
        if choice.action is Action.COMPRESS and choice.codec is not None
    }


T = TypeVar("T")


class Background(Generic[T]):
    """A call of `compute` on a thread of the first rank. The thread starts immediately.

    All ranks have to call `result` at the same step.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self.cpu_ms = 0.0
        """CPU time of `compute` in ms, which may have slowed training. 0 until `compute` has returned, and always 0 on
        ranks other than the first."""
        self._future: Future[T] = Future()
        if is_first_rank():
            threading.Thread(target=self._run, args=(compute,), name="adacc-solver").start()

    def result(self) -> T:
        """Wait for `compute`, and return its result on every rank. An error of `compute` is raised on every rank."""
        return broadcast_from_first_rank(self._future.result)

    def _run(self, compute: Callable[[], T]) -> None:
        started = time.thread_time()
        try:
            result = compute()
        except BaseException as error:  # raised again by `result`
            self._future.set_exception(error)
        else:
            self.cpu_ms = (time.thread_time() - started) * 1e3
            self._future.set_result(result)
