"""Tracking: measures codec errors, outlier channels and gradients in a few steps of a run (paper, section 3.4).

At a tracking step, the codecs count the outlier channels of the activations that they encode and measure round-trip
errors, and the gradient of a sampled block is compared with the exact one. Other steps measure nothing, and do not
synchronize with the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.corrections import lossy_options, with_outlier_counts
from adacc_hf.adapt.events import GuardVerdict, OutliersTracked
from adacc_hf.adapt.gradient_check import BlockSample, GradientError, comparison_peaks, peaks_with_samples
from adacc_hf.adapt.outlier_tracking import Measurements, MeasuringCodec, Observation, OptionKey, full_name
from adacc_hf.adapt.policy_choice import PolicyChoice, SizePolicy
from adacc_hf.adapt.policy_fit import error_bound, over_bound
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.torch_glue.batch_shapes import describe
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Results of one tracking step for one batch size: maxima over all blocks of a kind and over all ranks."""

    num_outliers: dict[str, int]
    """Number of outlier channels of each tracked activation."""
    errors: dict[str, float]
    """Relative L2 round-trip error of each compressed activation."""
    gradients: dict[int, GradientError]
    """Error of the gradients of sampled blocks under compression, by index of the kind of block."""
    degrading_codecs: frozenset[OptionKey]
    """Codecs to switch off, because with them the error of a block's gradient exceeds the allowed bound."""
    reason: str
    """Text on what has changed."""


class Tracking:
    """Measurements in tracking steps, for all batch sizes whose policies use lossy codecs.

    `start` is called at the beginning of the step, and `finish` at its end, on all ranks at the same steps.
    """

    def __init__(self, choice: PolicyChoice, run: RunState, policy_step: int) -> None:
        self.is_on = False
        """True during a tracking step."""
        self.num_tracked = 0
        """Number of tracking steps so far. The number decides which blocks are sampled next."""
        self.policy_step = policy_step
        """Number of finished steps when the policy was set. Tracking steps are counted from this step."""
        self.guard = LossGuard(run.config)
        self._choice, self._run, self._config = choice, run, run.config
        self._sizes: list[_TrackedSize] = []
        self._degraded_blocks: list[str] = []
        """Sampled blocks with degraded gradients, at the latest tracking step that found one."""
        self._has_said: set[str] = set()

    def is_due(self, step: int) -> bool:
        """Return True if the measurements are due in step number `step`."""
        return self.guard.suspicion is not None or is_tracking_step(step - self.policy_step, self._config.tracking)

    def start(self) -> None:
        """Begin the measurements of the current step.

        If a logged loss was suspicious, or a new policy is to be checked, gradients are compared in one block of each
        kind (blocks that run the same operators).
        """
        every_kind = self.guard.suspicion is not None
        self._choice.refresh(self._choice.shown)
        for record in self._choice.records.values():
            # A policy that is not compared with the latest corrections yet may use codecs that are switched off.
            if record.version == self._run.corrections.version and lossy_blocks(record.policy):
                names = self._sample_names(record, every_kind)
                self._sizes.append(_TrackedSize(record, self._run, names))
        self.is_on = any(gather_from_all_ranks(bool(self._sizes)))
        self.num_tracked += self.is_on

    def _sample_names(self, record: SizePolicy, every_kind: bool) -> list[str]:
        """Return the names of the blocks whose gradients are compared: if `every_kind`, the block of each lossy kind
        that was degraded last, or its first one; else one lossy block in turn, or none if the budget has no room. A
        comparison runs the block twice, and twice more for each compressed activation of a gradient above its limit."""
        names = lossy_blocks(record.policy)
        if every_kind:
            kinds = _kinds(record)
            suspects = [name for name in self._degraded_blocks if name in names]
            return list({kinds[name]: name for name in reversed([*suspects, *names])}.values())
        budget = self._run.budget(record.profile)
        if budget.limits_peak:
            peaks, after = peaks_with_samples(record.profile, record.policy), comparison_peaks(record.profile)
            names = [name for name in names if max(peaks[name], after[name]) <= budget.nbytes]
            if not names:
                sizes = "batches" if record.shapes is None else f"batches of {describe(record.shapes)}"
                text = "at %s the budget has no room to compare the gradient of a block with the exact one: none is "
                self._say(text + "compared", sizes)
        return [names[self.num_tracked % len(names)]] if names else []

    def _say(self, text: str, detail: str) -> None:
        """Log `text` once in the run."""
        if text not in self._has_said:
            self._has_said.add(text)
            log.info(f"Adacc: {text}", detail)

    def finish(self, step: int) -> list[Tracked]:
        """Correct the run's predictions by the measurements, which hold for the same blocks at all batch sizes, and
        replace the policy in use where they require it. Return the results for each batch size."""
        sizes, self._sizes, self.is_on = self._sizes, [], False
        guard, corrections = self.guard, self._run.corrections
        suspicion = guard.take_suspicion()
        own = Observation.merged([size.observed() for size in sizes])
        observed = Observation.merged(gather_from_all_ranks(own))
        unmeasured = sorted(set().union(*(size.unmeasured for size in sizes)))
        if unmeasured:
            self._say("the budget has no room to measure the round-trip errors of %s", ", ".join(unmeasured))
        blocks = {block for block, _, _ in observed.degrading_codecs}
        sampled = [name for size in sizes for name in size.sampled if name in blocks]
        self._degraded_blocks = sampled or self._degraded_blocks
        results = []
        corrections.observe(observed)
        corrections.switch_off(observed.degrading_codecs)
        if blocks:  # the next policy is checked, and tracked as often as the first one
            guard.check_next()
            self.policy_step = self._run.current_step
        for size in sizes:
            tracked = self._tracked(size.record, observed)
            results.append(tracked)
            size.record.error = max(tracked.errors.values(), default=None)
            size.record.gradient_error = max((g.error for g in tracked.gradients.values()), default=None)
            self._run.note(_event(step, size.record, tracked))
            judged = guard.judge(suspicion, size.record.profile, tracked)
            if judged is not None:
                self._run.note(GuardVerdict(step=step, reason=judged[0], verdict=judged[1]))
        self._choice.refresh(self._choice.shown)
        return results

    def _tracked(self, record: SizePolicy, observed: Observation) -> Tracked:
        profile = record.profile
        own = observed.for_profile(profile)
        corrected = self._run.corrections.allowed(self._run.corrections.applied(record.base, record.shapes))
        disallowed = over_bound(corrected, record.policy, self._config)
        if disallowed:
            reason = f"errors above the bound: {', '.join(disallowed)}"
        elif with_outlier_counts(profile, own.num_outliers) != profile:
            reason = "the number of outlier channels changed"
        else:
            reason = "outlier channels unchanged, errors within the bound"
        return Tracked(
            num_outliers={full_name(profile, key): count for key, count in own.num_outliers.items()},
            errors={full_name(profile, key): error for key, error in own.errors.items()},
            gradients=own.gradients,
            degrading_codecs=own.degrading_codecs,
            reason=reason,
        )

    def cancel(self) -> None:
        """Stop the measurements and drop their results. Do nothing outside tracking steps."""
        for size in self._sizes:
            size.close()
        self._sizes, self.is_on = [], False


class _TrackedSize:
    """Measurements of one tracking step under the policy of one batch size. `names` are the blocks whose gradients are
    compared."""

    def __init__(self, record: SizePolicy, run: RunState, names: list[str]) -> None:
        self.record, self._run = record, run
        self._plans, self._measurements = record.plans, Measurements()
        self._profile, self._policy = record.profile, record.policy
        self._kinds = _kinds(record)
        self.sampled = names
        self.unmeasured: set[str] = set()
        """Activations whose errors the budget had no room to measure in any block of a kind."""
        room = _forward_room(record, run)
        for name, kind in self._kinds.items():
            self._plans.strategies[name].wrap_codec = self._codec_wrapper(kind, room[name])
        self._samples = {name: BlockSample(self._plans.strategies[name]) for name in names}

    def _codec_wrapper(self, kind: int, room_bytes: float) -> Callable[[int, Codec], MeasuringCodec]:
        values = self._profile.kinds[kind].values

        def wrap(value: int, codec: Codec) -> MeasuringCodec:
            options = values[value].codecs
            return MeasuringCodec(codec, (kind, value), options, self._run.config, self._measurements, room_bytes)

        return wrap

    def observed(self) -> Observation:
        """End the step, compare the gradients of the sampled blocks, and return this rank's measurements by name."""
        self._stop_measuring()
        gradients, degrading_codecs = self._compare_gradients()
        missed = self._measurements.unmeasured - self._measurements.errors.keys()
        self.unmeasured = {full_name(self._profile, key) for key in missed}
        observation = self._measurements.read(gradients, degrading_codecs).by_name(self._profile)
        self.close()
        return observation

    def close(self) -> None:
        """Stop measuring, and free the recorded calls."""
        self._stop_measuring()
        for sample in self._samples.values():
            sample.close()
        self._samples = {}

    def _stop_measuring(self) -> None:
        for strategy in self._plans.strategies.values():
            strategy.wrap_codec = None

    def _compare_gradients(self) -> tuple[dict[int, GradientError], frozenset[OptionKey]]:
        """Return (gradient errors by index of the kind, codecs to switch off until the errors are within
        `gradient_bound`)."""
        errors_by_kind: dict[int, list[GradientError]] = {}
        degrading_codecs: frozenset[OptionKey] = frozenset()
        for name, sample in self._samples.items():
            error = sample.compare()
            if error is not None:
                errors_by_kind.setdefault(self._kinds[name], []).append(error)
                if error.error > gradient_bound(self._run.config):
                    degrading_codecs |= self._find_degrading(name, sample)
            sample.close()  # so that only one exact gradient is held at a time
        worst_errors = {kind: GradientError.worst(errors) for kind, errors in errors_by_kind.items()}
        return worst_errors, degrading_codecs

    def _find_degrading(self, name: str, sample: BlockSample) -> frozenset[OptionKey]:
        """Return the codecs without which the gradient error of block `name` is at most `gradient_bound`. If the
        search fails, warn and return all lossy codecs of the kind."""
        bound, kind = gradient_bound(self._run.config), self._kinds[name]
        lossy = {
            value: encoding_of(codec.name)
            for value, codec in _codecs(self._policy.plan_of(name)).items()
            if not codec.lossless
        }

        def error_without(values: frozenset[int]) -> float | None:
            error = sample.compare(values)
            return None if error is None else error.error

        values = find_culprits(lossy.keys(), bound, error_without)
        if values is None:
            log.warning(
                "Adacc: the codecs that degrade the gradient of %s cannot be determined: lossy compression is switched "
                "off for all blocks of its kind",
                name,
            )
            return lossy_options(self._profile, [name])
        return frozenset((kind, value, lossy[value]) for value in values)


def lossy_blocks(policy: Policy) -> list[str]:
    """Return the names of the blocks in which `policy` uses lossy codecs, in forward order."""
    lossy = [any(not codec.lossless for codec in _codecs(plan).values()) for plan in policy.plans]
    return [name for name, plan in policy.blocks if lossy[plan]]


def is_tracking_step(steps_since: int, tracking: str | int) -> bool:
    """Return True if outliers and errors are measured in the step that comes `steps_since` steps after the policy was
    set.

    `tracking` is the setting of AdaccConfig. "exponential" selects the steps 1, 2, 4, ... after the policy was set. A
    number N selects every N-th step.
    """
    if tracking == "off" or steps_since < 1:
        return False
    if tracking == "exponential":
        return steps_since & (steps_since - 1) == 0
    return steps_since % int(tracking) == 0


def _codecs(plan: Plan) -> dict[int, Codec]:
    return {
        value: get_codec(choice.codec, **dict(choice.options))
        for value, choice in plan.choices
        if choice.action is Action.COMPRESS and choice.codec is not None
    }


def _kinds(record: SizePolicy) -> dict[str, int]:
    """Return the index of the kind of block (`Profile.kinds`) of each block under the policy, by the block's name."""
    profile, policy = record.profile, record.policy
    return {block.name: profile.kind_index(block, policy.plan_of(block.name)) for block in profile.blocks}


def _forward_room(record: SizePolicy, run: RunState) -> dict[str, float]:
    """Return the bytes of the budget that are free in the forward of each block, by the block's name."""
    budget = run.budget(record.profile)
    room = {block.name: math.inf for block in record.profile.blocks}
    names = {f"forward {name}": name for name in room} if budget.limits_peak else {}
    for label, live in simulate_policy(record.profile, record.policy).timeline if names else ():
        if label in names:
            room[names[label]] = min(room[names[label]], budget.nbytes - live)
    return room


def _event(step: int, record: SizePolicy, tracked: Tracked) -> OutliersTracked:
    gradients = tracked.gradients.values()
    return OutliersTracked(
        step=step,
        reason=tracked.reason,
        num_outliers=tracked.num_outliers,
        errors=tracked.errors,
        compression_rate=record.policy.predicted_stored_bytes / record.profile.plain_stored_bytes,
        gradient_error=max((gradient.error for gradient in gradients), default=None),
        gradient_cosine=min((gradient.cosine for gradient in gradients), default=None),
    )


def gradient_bound(config: AdaccConfig) -> float:
    """Return the largest allowed relative error of a block's gradient under compression."""
    bound = error_bound(config)
    return DEGRADED_ERROR if bound is None else min(bound, DEGRADED_ERROR)


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
