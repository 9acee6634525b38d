"""Tracking: measures codec errors, outlier channels and gradients in a few steps of a run (paper, section 3.4).

At a tracking step, the codecs count the outlier channels of the activations that they encode and measure round-trip
errors, and the gradient of a sampled block is compared with the exact one. Codecs that degrade this gradient are not
used in later policies. Other steps measure nothing, and do not synchronize with the device.

After a suspicious loss in the logs, the next step compares the gradients of one block of every kind (blocks that run
the same operators). So does the first step of a policy without the codecs that were switched off, because it may
recompute a value that must be exact from compressed values.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from adacc_hf.adapt.corrections import SWITCHED_OFF, MeasuringCodec, Observation, by_index, full_name
from adacc_hf.adapt.gradient_check import BlockSample, check_peaks
from adacc_hf.adapt.policy_choice import PolicyChoice, SizePolicy
from adacc_hf.adapt.policy_fit import error_bound
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.torch_glue.distributed import gather_from_all_ranks, num_ranks

log = logging.getLogger(__name__)


class Tracking:
    """Measurements in tracking steps, for all batch sizes whose policies use lossy codecs.

    `start` is called at the beginning of the step, and `finish` at its end, on all ranks at the same steps.
    """

    def __init__(self, choice: PolicyChoice, run: RunState, policy_step: int) -> None:
        self.is_on = False
        """True during a tracking step."""
        self._policy_step = policy_step
        """Number of finished steps when the policy was set. Tracking steps are counted from this step."""
        self.due_step = next_tracking_step(run.current_step, policy_step, run.config.tracking)
        """Number of the step that is measured next, counted from 1."""
        self.suspicion: str | None = None
        """Reason to compare the gradients of all kinds of blocks in the next step, the same on all ranks, or None."""
        self.logged: str | None = None
        """Reason for a suspicion in this rank's logs, which the other ranks do not know yet."""
        self._choice, self._run = choice, run
        self._losses = LossHistory()
        self._sizes: list[_TrackedSize] = []
        self.num_tracked = 0
        """Number of tracking steps so far. The number decides which blocks are sampled next."""
        self._degraded: set[str] = set()
        """Blocks with degraded gradients, at the latest tracking step that found one."""

    def read_logs(self, logs: Mapping[str, float]) -> None:
        """Compare gradients in the next step if the loss or the gradient norm in `logs` is suspicious. Several ranks do
        so after they have exchanged their suspicions."""
        if self._run.config.tracking != "off":
            reason = self._losses.check(logs.get("loss"), logs.get("grad_norm"))
            if any(lossy_blocks(record.policy) for record in self._choice.records.values()):
                self.logged = self.logged or reason
        if num_ranks() == 1:
            self.suspect([self.logged])

    def suspect(self, reasons: Sequence[str | None]) -> None:
        """Compare gradients in the next step if the logs of some rank gave a reason (`logged`)."""
        self.logged, reason = None, next(filter(None, reasons), None)
        if reason is not None:
            self.suspicion, self.due_step = reason, self._run.current_step + 1

    def start(self) -> None:
        """Begin the measurements of the current step."""
        step = self._run.current_step
        self.due_step = next_tracking_step(step, self._policy_step, self._run.config.tracking)
        self._choice.refresh(self._choice.shown)
        for record in self._choice.records.values():
            # A policy that is not compared with the latest corrections yet may use codecs that are switched off.
            if record.version == self._run.corrections.version and lossy_blocks(record.policy):
                self._sizes.append(_TrackedSize(record, self._run, self._sample_names(record)))
        self.is_on = any(gather_from_all_ranks(bool(self._sizes)))
        self.num_tracked += self.is_on

    def _sample_names(self, record: SizePolicy) -> list[str]:
        """Return the names of the blocks whose gradients are compared with exact ones, as far as the budget has room
        for the comparison. If a codec is suspected, this is one block of each kind with lossy codecs: the block that
        was degraded last, or else the first. Otherwise it is one lossy block, another in each tracking step."""
        names, policy = lossy_blocks(record.policy), record.policy
        budget, room, needed = self._run.budget(record.profile), math.inf, dict.fromkeys(names, 0)
        if budget.limits_peak:
            room = budget.nbytes - policy.predicted_peak_bytes
            needed = {n: peak - policy.predicted_peak_bytes for n, peak in check_peaks(record.profile, policy).items()}
            names = [name for name in names if needed[name] <= room]
            if not names:
                log.info("Adacc: the budget has no room to compare the gradient of a block with the exact one")
        if self.suspicion is None:
            return [names[self.num_tracked % len(names)]] if names else []
        in_order = sorted(names, key=lambda name: name not in self._degraded)
        kinds = _kinds(record.profile, policy)
        samples = list({kinds[name]: name for name in reversed(in_order)}.values())
        totals = accumulate(needed[name] for name in samples)
        return [name for name, total in zip(samples, totals, strict=True) if total <= room]

    def finish(self) -> Observation:
        """Correct the run's predictions by the measurements, which hold for the same blocks at all batch sizes, and
        replace the policy in use where they require it. Return the measurements of all ranks."""
        sizes, self._sizes, self.is_on = self._sizes, [], False
        suspicion, self.suspicion = None if self.suspicion == SWITCHED_OFF else self.suspicion, None
        own = Observation.merged([size.observed() for size in sizes])
        observed = Observation.merged(gather_from_all_ranks(own))
        self._run.corrections.observe(observed)
        self._run.corrections.switch_off(observed.degrading_codecs)
        if observed.degrading_codecs:  # the next policy is checked, and tracked as often as the first one
            self._degraded = {block for block, _, _ in observed.degrading_codecs}
            self._policy_step = self._run.current_step
            self.suspect([SWITCHED_OFF])
        for size in sizes:
            self._note(size.record, observed)
        if sizes:
            self._note_verdict([size.record for size in sizes], observed, suspicion)
        self._choice.refresh(self._choice.shown)
        return observed

    def _note(self, record: SizePolicy, observed: Observation) -> None:
        """Append the measurements that belong to the policy of `record` to the history."""
        profile = record.profile
        used = {
            (kind, value, encoding_of(codec.name))
            for name, kind in _kinds(profile, record.policy).items()
            for value, codec in _codecs(record.policy.plan_of(name)).items()
        }
        errors = {key[:2]: error for key, error in by_index(profile, observed.errors).items() if key in used}
        record.error = max(errors.values(), default=None)
        record.gradient_error = max(observed.gradients.values(), default=None)
        self._run.note(
            "tracking",
            num_outliers={full_name(profile, k): n for k, n in by_index(profile, observed.num_outliers).items()},
            errors={full_name(profile, key): error for key, error in errors.items()},
            compression_rate=record.policy.predicted_stored_bytes / profile.plain_stored_bytes,
            gradient_error=record.gradient_error,
        )

    def _note_verdict(self, records: Sequence[SizePolicy], observed: Observation, suspicion: str | None) -> None:
        """Log what a comparison of gradients has shown, if it had a `suspicion` or found a degraded gradient."""
        worst = max(observed.gradients.values(), default=None)
        if observed.degrading_codecs:
            suspicion = suspicion or "a tracking step found a degraded gradient"
            off = dict.fromkeys(observed.degrading_codecs, 0)
            keys = [(record.profile, key) for record in records for key in by_index(record.profile, off)]
            names = ", ".join(sorted({f"{full_name(profile, key[:2])} ({key[2]})" for profile, key in keys}))
            verdict = f"lossy compression is switched off for {names}"
            log.warning("Adacc: %s, and compression degrades gradients (error %.3g): %s", suspicion, worst, verdict)
        elif suspicion is None:
            return
        elif worst is None:
            verdict = "no gradient was compared: the budget has no room, or the exact one is zero or not finite"
            log.warning("Adacc: %s; %s", suspicion, verdict)
        else:
            verdict = f"compression is not the cause: the relative error of gradients is at most {worst:.3g}"
            log.info("Adacc: %s; %s", suspicion, verdict)
        self._run.note("guard", reason=suspicion, verdict=verdict)

    def cancel(self) -> None:
        """Stop the measurements and drop their results. Do nothing outside tracking steps."""
        for size in self._sizes:
            size.close()
        self._sizes, self.is_on = [], False


class _TrackedSize:
    """Measurements of one tracking step under one size's policy, with the gradients of the blocks `names`."""

    def __init__(self, record: SizePolicy, run: RunState, names: list[str]) -> None:
        self.record, self._config = record, run.config
        self._policy, self._executors = record.policy, record.plans.strategies  # the record may get others in the step
        self._observation = Observation()
        kinds, room = _kinds(record.profile, record.policy), _forward_room(record, run)
        self._kinds = {name: record.profile.kinds[index] for name, index in kinds.items()}
        for name in kinds:
            self._executors[name].wrap_codec = self._codec_wrapper(name, room[name])
        self._samples = {name: BlockSample(self._executors[name], run.warn_once) for name in names}

    def _codec_wrapper(self, name: str, room_bytes: float) -> Callable[[int, Codec], MeasuringCodec]:
        kind = self._kinds[name]

        def wrap(value: int, codec: Codec) -> MeasuringCodec:
            activation, options = (name, kind.names[value]), kind.values[value].codecs
            return MeasuringCodec(codec, activation, options, self._config, self._observation, room_bytes)

        return wrap

    def observed(self) -> Observation:
        """End the step, compare the gradients of the sampled blocks, and return this rank's measurements."""
        self._stop_measuring()
        observation, bound = self._observation, gradient_bound(self._config)
        for name, sample in self._samples.items():
            error = sample.compare()
            if error is not None:
                observation.gradients[name] = error
                if error > bound:
                    observation.degrading_codecs |= self._find_degrading(name, sample, bound)
            sample.close()  # so that only one exact gradient is held at a time
        observation.read()
        return observation

    def close(self) -> None:
        """Stop measuring, and free the recorded calls."""
        self._stop_measuring()
        for sample in self._samples.values():
            sample.close()

    def _stop_measuring(self) -> None:
        for executor in self._executors.values():
            executor.wrap_codec = None

    def _find_degrading(self, name: str, sample: BlockSample, bound: float) -> set[tuple[str, str, str]]:
        """Return the codecs of block `name` that exceed `bound` on their own, or else the worst one, because the next
        step compares again. Return all lossy codecs of the block's kind if their errors cannot be measured. Round-trip
        errors do not show them: backward may recompute attention's softmax from queries and keys, for example."""
        kind, plan = self._kinds[name], self._policy.plan_of(name)
        lossy = {value: encoding_of(codec.name) for value, codec in _codecs(plan).items() if not codec.lossless}
        measured = {value: sample.compare(lossy.keys() - {value}) for value in lossy}
        errors = {value: error for value, error in measured.items() if error is not None}
        if errors.keys() == lossy.keys():
            limit = min(bound, max(errors.values()))
            return {(name, kind.names[value], lossy[value]) for value, error in errors.items() if error >= limit}
        log.warning(
            "Adacc: the codecs that degrade the gradient of %s cannot be determined: lossy compression is switched off "
            "for all blocks of its kind",
            name,
        )
        options = [(value, option) for value in kind.values for option in value.codecs if not option.lossless]
        return {(name, kind.names[value.index], option.codec) for value, option in options}


def lossy_blocks(policy: Policy) -> list[str]:
    """Return the names of the blocks in which `policy` uses lossy codecs, in forward order."""
    lossy = [any(not codec.lossless for codec in _codecs(plan).values()) for plan in policy.plans]
    return [name for name, plan in policy.blocks if lossy[plan]]


def next_tracking_step(step: int, policy_step: int, tracking: str | int) -> float:
    """Return the number of the first step after `step` in which outliers and errors are measured.

    `tracking` is the setting of AdaccConfig. "exponential" selects the steps 1, 2, 4, ... after the step `policy_step`,
    in which the policy was set. A number N selects every N-th step, and "off" none.
    """
    steps_since = step - policy_step
    if tracking == "off":
        return math.inf
    if tracking == "exponential":
        return policy_step + (1 << steps_since.bit_length())
    return policy_step + (steps_since // int(tracking) + 1) * int(tracking)


def gradient_bound(config: AdaccConfig) -> float:
    """Return the largest allowed relative error of a block's gradient under compression."""
    bound = error_bound(config)
    return DEGRADED_ERROR if bound is None else min(bound, DEGRADED_ERROR)


def _codecs(plan: Plan) -> dict[int, Codec]:
    return {
        value: get_codec(choice.codec, **dict(choice.options))
        for value, choice in plan.choices
        if choice.action is Action.COMPRESS and choice.codec is not None
    }


def _kinds(profile: Profile, policy: Policy) -> dict[str, int]:
    """Return the index of the kind (`Profile.kinds`) that each block has under the policy, by the block's name."""
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


WINDOW = 16
"""Number of earlier logged losses with which a new loss is compared."""
MIN_LOSSES = 4
"""Minimum number of earlier losses with which a loss is compared. A median of fewer losses would be close to a single
loss."""
NOISE = 4.0
"""Largest distance of a normal loss from the median of the latest losses, in units of their median absolute deviation.
Losses around zero, as in reinforcement learning, are often many times their median. Of normally distributed losses, one
in 300 lies above this distance."""


class LossHistory:
    """The latest logged losses. Other losses are not read, because the host would wait for the device."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float | None, gradient_norm: float | None) -> str | None:
        """Add `loss`. Return a text if `loss` or `gradient_norm` is not finite, or if `loss` is a spike, else None.

        An argument is None if the training loop did not log this number. A loss is a spike if its distance above the
        median exceeds both NOISE times the median absolute deviation, and the median's absolute value.
        """
        for name, value in (("loss", loss), ("grad_norm", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        if loss is None:
            return None
        losses = list(self._losses)
        # Spikes are added too: a loss that stays high, as on other data, counts as normal after half a window.
        self._losses.append(loss)
        if len(losses) < MIN_LOSSES:
            return None
        median = statistics.median(losses)
        deviation = statistics.median(abs(other - median) for other in losses)
        if loss - median <= max(abs(median), NOISE * deviation):
            return None
        comparison = f"{loss / median:.1f} times" if median > 0 else f"far above {median:.4g},"
        return f"loss {loss:.4g} is {comparison} the median of the last {len(losses)}"
