"""What becomes of a run's policy once it is set: tracking, solving again, guarding accuracy, other batch sizes.

NOTE [Timetable of a step]. All ranks do the same at the same step.
1. Step begins: at a tracking step, the policies in force measure. At the next normal one, its memory is counted.
2. Each micro-batch: the policy for its size is put in force. Out of memory: tighter policy, once more.
3. Step ends: a) what was measured goes into the prices; b) what was solved `takeover_steps` steps ago is taken over; c)
   if prices moved, the solver starts on a thread. Now and then a size that was seen often is profiled; and once blocks
   are trained that the profiled batch ran without gradients, or most batches run other operators than it did, all are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import Saved
from adacc_hf.adapt.extrapolated_policies import ExtrapolatedPolicies
from adacc_hf.adapt.fallback_stats import MORE_BLOCKS, NO_POLICY, OTHER_OPERATORS, DivergedBatches, Restart, ratio
from adacc_hf.adapt.loss_spike import LossGuard
from adacc_hf.adapt.outlier_tracking import NamedObservation
from adacc_hf.adapt.policy_cache import (
    MAX_OTHERS,
    MAX_SHAPE_POLICIES,
    InForce,
    PolicyCache,
    SizePolicy,
    most_wanted,
    moved,
    predictions,
    step_times,
    tracking_figures,
)
from adacc_hf.adapt.policy_selection import NOTHING_FITS, current_policy, with_margin
from adacc_hf.adapt.replanner import Replanner, Tracking
from adacc_hf.adapt.step_timer import CountingTurns, StepMeter, advice, tighter_budget
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.batch_subsampling import at_size
from adacc_hf.price.memory_profile import missing_bytes, with_missing
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.solver import quick_least_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements, to_profile_shapes
from adacc_hf.torch_glue.distributed import check_same_policy, broadcast_from_first_rank, num_ranks, gather_from_all_ranks

log = logging.getLogger(__name__)

LOOK_STEPS = 16
"""Steps between two looks at which batch sizes have no policy; with several ranks each look is a collective."""

PEAK_TOLERANCE = 0.01
"""A measured peak this far above the predicted one corrects the prices even if it keeps to the budget. Below that are
what allocators round, and a few small tensors of the Trainer's that the profiler does not see."""

RECORDED_STEPS = 2
"""First steps of a handle, whose calls are recorded: they take longer than those that follow, and more memory where no
profile has recorded the model before."""

NoteEvent = Callable[..., None]


def is_tracking_step(steps_since: int, tracking: str | int) -> bool:
    """Whether outliers are looked at `steps_since` steps after the policy was set: 1, 2, 4, ... if "exponential"."""
    if tracking == "off" or steps_since < 1:
        return False
    if tracking == "exponential":
        return steps_since & (steps_since - 1) == 0
    return steps_since % int(tracking) == 0


class Controller:
    """Follows one run from the step at which its policy was set."""

    def __init__(
        self,
        handle: PolicyHandle,
        config: AdaccConfig,
        policy_step: int,
        note: NoteEvent,
        num_micro: int,
        num_uncounted: int = 0,
    ) -> None:
        self.config = config
        self._tightened: float | int | None = None
        """The budget of new policies after a step ran out of memory."""
        self.policy_step = policy_step
        self.shape_policies = PolicyCache()
        self.wanted: BatchShapes | None = None
        """Sizes to be profiled with the next step's batch."""
        self.fresh_start = Restart()
        self._left_plans = DivergedBatches(config, self._say)
        self.tracking_ms = 0.0
        """Time that tracking, solving, counting memory and profiling other sizes took so far, by how much longer such
        steps were than normal ones. The caller of `step_ends` adds what it and all that follows from it took, if
        `is_busy`."""
        self.is_busy = False
        """Whether there was anything to do at the end of the last step."""
        self.missing_bytes: dict[str, int] = {}
        """What steps take at their moments that no profile sees."""
        self.counted_elements = 0
        """Elements of the largest micro-batch of the step that showed them."""
        self._handle = handle
        self._in_force = InForce(handle)
        handle.tape_cache.may_record = self._may_record
        self._has_said_room = False
        self._note = note
        self._num_micro = num_micro
        self._num_uncounted = num_uncounted
        """Batches that a count of a step's memory leaves out."""
        self._batch_bytes = 0
        """Bytes of the largest micro-batch of the step."""
        self._meter = StepMeter()
        self.guard = LossGuard(config)
        self._turns = CountingTurns()
        self._is_tracking = self._is_metering = False
        self._step = policy_step
        """The step that runs, counted from 1."""
        self._is_alone = num_ranks() == 1

    @property
    def memory_budget(self) -> str | float | int:
        """The budget of new policies: the config's, or less after a step ran out of memory."""
        return self.config.memory_budget if self._tightened is None else self._tightened

    @property
    def shown(self) -> SizePolicy:
        """The shape policy of the last micro-batch; the first one if that ran under torch's checkpoint."""
        return self._in_force.size_policy or self.shape_policies.all[0]

    @property
    def last_shapes(self) -> BatchShapes:
        """Sizes of the last micro-batch."""
        return self._in_force.shapes

    @property
    def idle_blocks(self) -> set[str]:
        """Blocks that a policy decides nothing about, the same on all ranks."""
        return set().union(*(size_policy.replanner.policy.idle_blocks for size_policy in self.shape_policies.all))

    def saved(self, history: list[dict[str, Any]]) -> Saved:
        """What a run needs to go on from here."""
        shown = self.shown
        return Saved(
            shape_policies=[
                s.saved() for s in [shown, *(other for other in self.shape_policies.all if other is not shown)]
            ],
            policy_step=self.policy_step,
            memory_budget=self.config.memory_budget,
            tightened=self._tightened,
            history=history,
            losses=self.guard.losses,
            suspicion=self.guard.suspicion,
            switched_off=sorted(self.guard.switched_off),
            is_unproven=self.guard.is_unproven,
            tracking_ms=self.tracking_ms,
            missing_bytes=dict(self.missing_bytes),
            counted_elements=self.counted_elements,
        )

    def restore(self, saved: Saved) -> None:
        """Go on where the run stood that wrote `saved`; what its solver had begun is begun anew."""
        self.tracking_ms, self._tightened = saved.tracking_ms, saved.tightened
        self.missing_bytes, self.counted_elements = dict(saved.missing_bytes), saved.counted_elements
        self.guard = LossGuard(self.config, saved.losses, saved.switched_off)
        self.guard.suspicion, self.guard.is_unproven = saved.suspicion, saved.is_unproven
        for record in reversed(saved.shape_policies):
            if record.profile is not None:  # one whose file is gone is made anew
                self.add(record.shapes, record.profile, record.policy, is_told=record.is_told).go_on(record)

    def add(
        self,
        shapes: BatchShapes | None,
        profile: Profile,
        policy: Policy,
        is_provisional: bool = False,
        was_measured: bool = False,
        is_told: bool = False,
    ) -> SizePolicy:
        """Be ready for batches of `shapes`, and follow `policy` from now on, or until a step was counted.

        `was_measured` says whether other sizes were to be measured with `profile`, as far as the model lets them be.
        """
        plans = self._handle.prepare(policy, self._handle.plans)
        replanner = Replanner(profile, policy, self.config, self.memory_budget)
        size_policy = SizePolicy(shapes, replanner, plans, is_provisional=is_provisional, is_told=is_told)
        size_policy.replanner.switch_off(self.guard.switched_off)
        self.shape_policies.add(size_policy)
        self.shape_policies.may_measure = not was_measured or profile.sizes is not None
        self._in_force.put(size_policy, plans)
        self._turns.wait(RECORDED_STEPS)
        self._turns.is_wanted |= is_provisional
        return size_policy

    def start_over(self, shapes: BatchShapes | None, profile: Profile, policy: Policy) -> None:
        """Follow `policy` alone: those for other sizes leave blocks out that it has plans for."""
        self.cancel()
        self.shape_policies.all.clear()
        self.fresh_start.tried.discard(MORE_BLOCKS)
        self.add(shapes, profile, policy)

    def can_start_over(self) -> bool:
        """Whether the last batch, on every rank, called all blocks that any batch has trained so far, by the operators
        that most batches run."""
        installation = self._handle.installation
        is_whole = not set(installation.skipped_blocks()).difference(installation.uncalled())
        return all(gather_from_all_ranks(self.fresh_start.takes(is_whole, self._left_plans.has_left)))

    def step_begins(self, step: int, model: nn.Module | None, optimizer: Any) -> None:
        """`step` is the number of the step that begins, counted from 1."""
        self._step = step
        due = is_tracking_step(step - self.policy_step, self.config.tracking)
        self._in_force.begin_step()
        self._batch_bytes = 0
        self._meter.begin()
        if due or self.guard.suspicion is not None:
            self._start_tracking()
        if self._turns.step_begins() and not self._is_tracking and model is not None:
            self._is_metering = True
            is_provisional = any(size_policy.is_provisional for size_policy in self.shape_policies.all)
            functions = self._handle.installation.functions if is_provisional else None
            self._meter.count_memory(model, optimizer, functions)

    def choose(self, shapes: BatchShapes, nbytes: int = 0) -> None:
        """Put the policy for a micro-batch of `shapes`, which has `nbytes`, in force."""
        self._batch_bytes = max(self._batch_bytes, nbytes)
        in_force = self._in_force
        if not in_force.lasts or shapes != in_force.shapes:
            self._choose_anew(shapes)
        in_force.runs(shapes)

    def _choose_anew(self, shapes: BatchShapes) -> None:
        in_force = self._in_force
        in_force.shapes = shapes
        sizes = self.shape_policies.class_of(shapes)
        size_policy = self.shape_policies.around(shapes) if sizes is None else self._shape_policy_at(sizes, shapes)
        plans = None if size_policy is None else size_policy.plans
        if size_policy is None and sizes is not None:
            plans = self.shape_policies.other(sizes, shapes)
        if size_policy is not in_force.size_policy or plans is not in_force.plans:
            in_force.put(size_policy, plans)
        # Batches that want a policy of their own are counted each time.
        in_force.lasts = size_policy is not None and not self.shape_policies.counted

    def has_run(self, calls: Mapping[str, int]) -> tuple[float, dict[str, int]]:
        """(predicted overhead in milliseconds of the last micro-batch, how many of its calls ran otherwise than a
        policy says by why); of its blocks' `calls` these are known to have left their plans."""
        in_force, left = self._in_force, self._left_plans
        plans, current = in_force.plans, in_force.size_policy
        if plans is None:
            left.ran(0.0)
            return self._fell_back(), {NO_POLICY: 1}
        policy = plans.policy
        if current is not None:
            policy = current.replanner.policy  # today's prices
        planned_ms = policy.predicted_overhead_ms * ratio(in_force.shapes, None if current is None else current.shapes)
        share = min(1.0, sum(calls.values()) / len(policy.blocks))
        left.ran(share)
        if not calls:
            return planned_ms, {}
        return (1 - share) * planned_ms + share * self._fell_back(), dict(calls)

    def _fell_back(self) -> float:
        """Overhead of the last micro-batch if all of it ran under full recomputation."""
        return self._left_plans.overhead_ms(self._in_force.shapes, self._reference, self.memory_budget)

    def _may_record(self) -> bool:
        """Whether the micro-batch keeps to the budget while a block's call is recorded."""
        return self._left_plans.may_record(self._in_force.shapes, self._reference, self.memory_budget)

    @property
    def _reference(self) -> SizePolicy:
        """The shape policy whose profile tells most of the last micro-batch."""
        return self._in_force.size_policy or self.shape_policies.measured or self.shown

    def _shape_policy_at(self, sizes: BatchShapes, shapes: BatchShapes) -> SizePolicy | None:
        """The shape policy of the class `sizes` of a batch of `shapes`, made if it is new.

        None if the class runs under plans that are in no shape policy's force.
        """
        known = self.shape_policies.at(sizes) or self.shape_policies.at(shapes)
        if known is not None or self.shape_policies.other(sizes, shapes) is not None:
            return known
        measured, _ = self.shape_policies.told_from()
        if measured.is_provisional:
            return self._least_at(sizes, measured)
        sizes, profile, policy = self._told().of(sizes, shapes)
        if not self._is_alone or len(self.shape_policies.all) >= MAX_SHAPE_POLICIES:
            plans = self._handle.prepare(policy, self._handle.plans)
            note_latest(self.shape_policies.others, sizes, plans, MAX_OTHERS)
            return None
        return self._add_told(sizes, profile, policy)

    def _least_at(self, sizes: BatchShapes, measured: SizePolicy) -> SizePolicy | None:
        """The shape policy of a class before a step was counted: `measured`, or that of its own least memory, where a
        batch of this class would take more than the budget under the former. Several ranks have plans alone then."""
        profile = self._told().profile_at(sizes)
        policy = current_policy(profile, measured.replanner.policy)
        if not measured.replanner.is_over_budget(policy.predicted_peak_bytes):
            return measured
        policy = quick_least_policy(self._told().allowed(profile), with_margin(self.config))
        if not self._is_alone:
            note_latest(self.shape_policies.others, sizes, self._handle.prepare(policy, self._handle.plans), MAX_OTHERS)
            return None
        least = self._add_told(sizes, profile, policy)
        least.is_provisional = True
        return least

    def _told(self) -> ExtrapolatedPolicies:
        switched_off = self.guard.switched_off
        return ExtrapolatedPolicies(
            self.config,
            self.memory_budget,
            self.shape_policies,
            switched_off,
            self.missing_bytes,
            self.counted_elements,
            self._say,
        )

    def _say(self, reason: str) -> None:
        """Put what memory is like into the run's history, at the step that runs."""
        self._note(self._step, "memory", reason=reason)

    def _add_told(self, sizes: BatchShapes, profile: Profile, policy: Policy) -> SizePolicy:
        """Be ready for batches of a class whose `profile` was told from another one's."""
        _, told = self.shape_policies.told_from()
        plans = self._handle.prepare(policy, self._handle.plans)
        replanner = Replanner(profile, policy, self.config, self.memory_budget)
        replanner.switch_off(self.guard.switched_off)
        size_policy = SizePolicy(sizes, replanner, plans, is_told=True, num_steps=RECORDED_STEPS)
        is_larger = num_elements(sizes) > told.largest
        size_policy.must_count = is_larger
        self._turns.is_wanted |= is_larger
        self.shape_policies.add(size_policy)
        self._in_force.lasts = False
        self._note(self._step, "policy", **predictions(policy), reason=f"for batches of {describe(sizes)}")
        return size_policy

    def backward_is_over(self) -> None:
        self._meter.backward_is_over()

    def step_ends(self, step: int) -> bool:
        """Returns whether a policy changed."""
        self._meter.end()
        for size_policy in self._in_force.used_shape_policies():
            if size_policy is not None:
                size_policy.num_steps += 1
        self._count_time()
        was_tracking = self._is_tracking
        is_due = any(
            size_policy.due is not None and step >= size_policy.due for size_policy in self.shape_policies.all
        )
        self.is_busy = was_tracking or self._is_metering or is_due
        changed = False
        if was_tracking:
            self._finish_tracking(step)
        elif self._is_metering:
            changed = self._compare_peaks(step)
        self._is_metering = False
        self._meter.close()
        changed |= self._take_over(step)
        is_looking = (step - self.policy_step) % LOOK_STEPS == 0
        if is_looking or self._is_alone:
            self._look_for_sizes()
        if is_looking:
            self._look_for_reasons()
        return changed

    def logged(self, logs: Mapping[str, float]) -> None:
        """Look at what all ranks log; a check of all kinds follows in the next step if it is suspicious."""
        self.guard.logged(logs, any(size_policy.replanner.has_work() for size_policy in self.shape_policies.all))

    def tighten(self, step: int) -> str | None:
        """Plan with less memory after `step` ran out of it; returns why that cannot be, or None."""
        self.cancel()
        size_policy = self._in_force.size_policy
        if num_ranks() > 1:
            return "the other ranks are in the middle of it"
        if size_policy is None:
            return "it ran under full recomputation already"
        replanner = size_policy.replanner
        budget = tighter_budget(replanner)
        try:
            policy = replanner.solve_within(budget)
        except InfeasibleBudgetError as error:
            return f"no policy needs that much less: {error}"
        self._tightened = budget
        size_policy.due, size_policy.must_solve = None, False
        self._follow(step, size_policy, policy)
        self._note(step, "memory", reason=f"out of memory: from now on memory_budget={budget}", **predictions(policy))
        return None

    def advice(self) -> str:
        return advice(self.shown.replanner)

    def cancel(self) -> None:
        """Stop measuring. Harmless when nothing is measured."""
        for size_policy in self.shape_policies.all:
            size_policy.replanner.cancel_tracking()
        self._meter.close()
        self._is_tracking = self._is_metering = False

    def _follow(self, step: int, size_policy: SizePolicy, policy: Policy) -> None:
        self._in_force.lasts = False
        size_policy.plans = self._handle.prepare(policy, size_policy.plans)
        size_policy.times.start_over()
        size_policy.is_fresh = True
        if self.guard.policy_changed():
            self.policy_step = step  # tracked as closely as the first one
        if size_policy is self._in_force.size_policy:
            self._in_force.put(size_policy, size_policy.plans)

    def _start_tracking(self) -> None:
        for size_policy in self.shape_policies.all:
            if size_policy.replanner.has_work():
                size_policy.replanner.start_tracking(size_policy.plans, every_kind=self.guard.suspicion is not None)
                self._is_tracking = True
        lack_room = [s for s in self.shape_policies.all if s.replanner.lacks_room]
        if lack_room and not self._has_said_room:
            self._has_said_room = True
            sizes = "batches" if lack_room[0].shapes is None else f"batches of {describe(lack_room[0].shapes)}"
            log.info(
                "Adacc: at %s the budget has no room to compare gradients of %d blocks (guard_blocks) with exact ones: "
                "as many are as it has room for",
                sizes,
                self.config.guard_blocks,
            )
        # On a CPU counting takes a profiler, as long as a step: not again for the same actions while they are tracked.
        self._turns.is_wanted = not self._is_tracking or any(
            size_policy.must_count for size_policy in self.shape_policies.all
        )

    def _finish_tracking(self, step: int) -> None:
        self._is_tracking = False
        suspicion = self.guard.taken_suspicion()
        must_solve, is_degraded = {}, False
        tracked = [size_policy for size_policy in self.shape_policies.all if size_policy.replanner.is_tracking]
        observed = NamedObservation.merged([size_policy.replanner.observed() for size_policy in tracked])
        for size_policy in self.shape_policies.all:
            found = size_policy.replanner.reprice(observed)
            if size_policy not in tracked:
                must_solve[id(size_policy)] = found.needs_solving
                continue
            size_policy.error = max(found.errors.values(), default=None)
            size_policy.gradient_error = max((g.error for g in found.gradients.values()), default=None)
            self._note(step, "tracking", **tracking_figures(size_policy, found))
            must_solve[id(size_policy)] = found.needs_solving
            self.guard.switched_off |= size_policy.replanner.switched_off
            doubt = suspicion or self.guard.doubt(found)
            is_degraded |= doubt is not None and self._judge(step, size_policy, doubt, found)
        for size_policy in self.shape_policies.all:
            size_policy.replanner.switch_off(self.guard.switched_off)
            if is_degraded or must_solve.get(id(size_policy)):
                self._solve_from(step, size_policy)

    def _judge(self, step: int, size_policy: SizePolicy, suspicion: str, found: Tracking) -> bool:
        is_degraded, verdict = self.guard.judge(suspicion, size_policy.replanner.profile, found)
        self._note(step, "guard", reason=suspicion, verdict=verdict)
        return is_degraded

    def _compare_peaks(self, step: int) -> bool:
        """Correct prices where a step took more memory than predicted; each rank may have had another size.

        Returns whether a policy changed.
        """
        mine, used, changed = None, self._in_force.used_shape_policies(), False
        known = [s for s in used if s is not None and s.num_steps > RECORDED_STEPS]
        if len(known) == len(used):
            # The peak of a step is that of its largest micro-batch.
            largest = max(known, key=lambda size_policy: size_policy.replanner.predicted_peak_bytes())
            besides, measured = self._num_uncounted * self._batch_bytes, self._meter.peak_bytes
            by_moment = {moment: nbytes + besides for moment, nbytes in self._meter.moments.items()}
            peak = None if measured is None else measured + besides
            mine = (self.shape_policies.all.index(largest), peak, by_moment, self._in_force.largest)
        peaks: dict[int, int] = {}
        moments: dict[str, int] = {}
        sizes: BatchShapes = ()
        for found in gather_from_all_ranks(mine):
            if found is not None and found[1] is not None:
                sizes = max(sizes, found[3], key=num_elements)
                peaks[found[0]] = max(found[1], peaks.get(found[0], 0))
                moments = {m: max(found[2].get(m, 0), moments.get(m, 0)) for m in {**moments, **found[2]}}
        self._turns.ended(in_vain=not peaks)
        for index, peak in sorted(peaks.items()):
            size_policy = self.shape_policies.all[index]
            if size_policy.is_provisional:
                changed = self._settle(step, size_policy, peak, moments, sizes)
            else:
                self._compare_peak(step, size_policy, peak)
        return changed

    def _settle(
        self, step: int, size_policy: SizePolicy, peak: int, moments: Mapping[str, int], largest: BatchShapes
    ) -> bool:
        """Follow the policy for what a whole step was found to take; return whether it is another one.

        `largest` are the sizes of the largest micro-batch of all ranks in that step.
        """
        replanner, before = size_policy.replanner, size_policy.replanner.policy
        size_policy.measured_peak_bytes, size_policy.must_count, size_policy.is_provisional = peak, False, False
        counted = self._at_counted(replanner.profile, largest)
        current = current_policy(counted, before)  # tracking may have priced other outlier channels
        self.missing_bytes = missing_bytes(counted, current, moments)
        self.counted_elements = num_elements(largest)
        predicted, above = replanner.predicted_peak_bytes(), max(self.missing_bytes.values(), default=0)
        self._note(step, "memory", measured_peak_bytes=peak, peak_bytes=predicted, corrected=above > 0)
        reason = f"a whole step was counted, which takes up to {above} bytes more than was profiled"
        changed = self._solve_settled(step, size_policy, reason)
        for other in self.shape_policies.all:
            if other.is_provisional:
                other.is_provisional = False
                changed |= self._solve_settled(step, other, reason)
        return changed

    def _solve_settled(self, step: int, size_policy: SizePolicy, reason: str) -> bool:
        """Follow the policy for what a counted step has shown; returns whether there is one."""
        replanner, before = size_policy.replanner, size_policy.replanner.policy
        started = time.perf_counter()
        try:
            policy = replanner.solve_for(with_missing(replanner.profile, self.missing_bytes))
        except InfeasibleBudgetError as error:
            log.warning("Adacc: step %d: %s: %s; the policy of least memory stays", step, NOTHING_FITS, error)
            self._note(step, "memory", reason=f"{NOTHING_FITS}: {error}")
            return False
        waited_ms = (time.perf_counter() - started) * 1e3
        self._change(step, size_policy, before, policy, reason, waited_ms)
        return True

    def _at_counted(self, profile: Profile, largest: BatchShapes) -> Profile:
        """Return the profile of a counted step, whose largest micro-batch has the sizes `largest`: `profile` if none
        tells of these sizes."""
        if self.shape_policies.class_of(largest) is None:
            return profile
        measured = self.shape_policies.told_from()[0].replanner.profile
        known = {name for name, _ in measured.measured[0][0]}
        return at_size(measured, tuple(size for size in to_profile_shapes(largest) if size[0] in known))

    def _compare_peak(self, step: int, size_policy: SizePolicy, peak: int) -> None:
        predicted = size_policy.replanner.predicted_peak_bytes()
        size_policy.measured_peak_bytes, size_policy.must_count = peak, False
        above = peak > predicted * (1 + PEAK_TOLERANCE) or (
            peak > predicted and size_policy.replanner.is_over_budget(peak)
        )
        self._note(step, "memory", measured_peak_bytes=peak, peak_bytes=predicted, corrected=above)
        if above:
            size_policy.replanner.add_memory(peak - predicted)
            self._solve_from(step, size_policy)

    def _solve_from(self, step: int, size_policy: SizePolicy) -> None:
        if size_policy.is_provisional:  # solved as soon as a step was counted
            return
        size_policy.must_solve = size_policy.replanner.is_solving
        if not size_policy.must_solve:
            size_policy.replanner.start_solving()
            size_policy.due = step + self.config.takeover_steps

    def _take_over(self, step: int) -> bool:
        changed = False
        for size_policy in self.shape_policies.all:
            if size_policy.due is None or step < size_policy.due:
                continue
            started = time.perf_counter()
            before, found = size_policy.replanner.policy, size_policy.replanner.take_over()
            waited_ms = (time.perf_counter() - started) * 1e3
            size_policy.due = None
            # Waiting is part of this step's work; what the solver computed before was taken from training's core.
            self.tracking_ms += max(0.0, size_policy.replanner.solver_ms - waited_ms)
            if NOTHING_FITS in found.reason:
                log.warning("Adacc: step %d: %s", step, found.reason)
            if found.policy is None:
                if found.reason.startswith(NOTHING_FITS):
                    self._note(step, "memory", reason=found.reason)
            else:
                changed = True
                self._change(step, size_policy, before, found.policy, found.reason, waited_ms)
            if size_policy.must_solve:
                self._solve_from(step, size_policy)
        return changed

    def _change(
        self, step: int, size_policy: SizePolicy, before: Policy, policy: Policy, reason: str, waited_ms: float
    ) -> None:
        check_same_policy(policy)
        extra_ms = (policy.predicted_overhead_ms - before.predicted_overhead_ms) * self._num_micro
        step_ms = size_policy.times.median_ms
        size_policy.predicted_step_ms = None if step_ms is None else step_ms + extra_ms
        actions, channels = moved(before, policy)
        if actions:
            size_policy.must_count = self._turns.is_wanted = True
            self._turns.wait(0)
        text = f"{actions} actions, {channels} sets of channels"
        figures = predictions(policy) | {"moved": text, "waited_ms": waited_ms}
        self._note(step, "change", reason=reason, **figures, **step_times(size_policy))
        self._follow(step, size_policy, policy)
        log.info("Adacc: policy changed at step %d (%s): %s", step, reason, policy.summary())

    def _look_for_sizes(self) -> None:
        """Want a profile of sizes that none tells of; and with several ranks, be ready for the classes that came."""
        if len(self.shape_policies.all) >= MAX_SHAPE_POLICIES:
            return
        if self._is_alone:
            self.wanted = most_wanted([self.shape_policies.unplanned()]) if self.shape_policies.counted else None
        else:
            self.wanted = most_wanted(gather_from_all_ranks(self.shape_policies.unplanned()))
            came = list(self.shape_policies.others)
            for sizes in sorted(set().union(*gather_from_all_ranks(came)), key=repr)[
                : MAX_SHAPE_POLICIES - len(self.shape_policies.all)
            ]:
                told = self._told()
                profile = told.profile_at(sizes)
                policy = broadcast_from_first_rank(partial(told.or_least, sizes, profile))
                self._add_told(sizes, profile, policy)

    def _look_for_reasons(self) -> None:
        """Want a batch to start over with, once for each reason there is."""
        idle, blocks, tried = self.idle_blocks, self._handle.installation.blocks, self.fresh_start.tried
        reasons = {MORE_BLOCKS: any(blocks[name].num_calls for name in idle)} if idle else {}
        reasons[OTHER_OPERATORS] = self._left_plans.most_did()
        for why, is_mine in reasons.items():
            if why not in tried and any(gather_from_all_ranks(is_mine)):
                self.fresh_start.want(why)

    def _count_time(self) -> None:
        """Put the step that ends among the normal ones, or what it took beyond one into `tracking_ms`."""
        current, step_ms = self._in_force.size_policy, self._meter.step_ms
        if step_ms is None or current is None or not self._in_force.ran_alone() or current.num_steps <= RECORDED_STEPS:
            self.tracking_ms += self._meter.counting_ms
        elif self._is_tracking or self._is_metering or current.is_fresh:
            self.tracking_ms += current.times.add_other(step_ms)
        else:
            self.tracking_ms += current.times.add_normal(step_ms)
        if current is not None:
            current.is_fresh = False
