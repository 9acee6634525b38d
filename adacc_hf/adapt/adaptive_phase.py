"""AdaptivePhase: training under policies that are adapted to the data and to the batch sizes during the run.

NOTE [Timetable of a step]. All ranks do the same at the same step. Part 2 runs in every step, and parts 1 and 3 only
when they are due.
1. Step begins: if a tracking step is due, the measurement of outliers and gradient errors starts. Otherwise, if the
   policy has changed, the measurement of the step's memory starts.
2. Micro-batch: the policy for the micro-batch's size is applied (policy_choice.py). If memory runs out, the micro-batch
   runs again under a tighter policy.
3. Step ends: a) measurements change the predictions of profiles (tracking_steps.py, peak_check.py); b) results of
   solver runs that began in the step before are applied; c) solver runs start where predictions have changed
   (replanning.py); d) a micro-batch is recorded for a batch size without a policy, or if the model now trains more
   blocks than the profile contains, or runs other operators (profile_requests.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from adacc_hf.adapt.announcements import describe_costs
from adacc_hf.adapt.checkpoint_files import Saved
from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.coverage import refuse_fallbacks
from adacc_hf.adapt.events import MemoryNoted, PolicySet, predictions
from adacc_hf.adapt.first_steps import CHECKING, FOLLOWING, MEASURING, TRACKING
from adacc_hf.adapt.fixed_policy_phase import FixedPolicyPhase
from adacc_hf.adapt.oom_retry import advice, memory_reported, run_with_retry
from adacc_hf.adapt.peak_check import PeakCheck
from adacc_hf.adapt.policy_builder import PolicyBuilder, RefusedSizeError
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.profile_requests import FALLBACK_MODES, ProfileRequests
from adacc_hf.adapt.replanning import Replanning
from adacc_hf.adapt.run_context import RECORDED_STEPS, RunContext
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.tracking_steps import TrackingSteps, is_tracking_step
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, from_profile_shapes
from adacc_hf.torch_glue.distributed import gather_from_all_ranks, num_ranks
from adacc_hf.torch_glue.progress import SlowReport, announce

log = logging.getLogger(__name__)

LOOK_STEPS, FIRST_LOOKS = 16, 8
"""Number of steps after which all ranks decide together, by collectives, if a batch is to be recorded. They also do so
at each of the first FIRST_LOOKS steps."""

TASKS = {
    TRACKING: "which measures outliers and gradient errors",
    MEASURING: "whose memory is measured",
    CHECKING: "the first under a new policy, which checks the records of the blocks",
}
"""Names of a step's tasks besides training, which the log line about a slow step lists."""


class AdaptivePhase(FixedPolicyPhase):
    """Phase of a run that adapts its policies to the data and to the batch sizes: the controller of the run."""

    def __init__(self, run: RunState, handle: PolicyHandle, policy_step: int) -> None:
        """Create the phase without a policy. `begin_after_step` or `resume` adds the first policy.

        `policy_step` is the number of finished steps when the run's first policy was set.
        """
        super().__init__(run, handle)
        self.context = RunContext(run.config, policy_step, run.note, LossGuard(run.config), step=run.step)
        self.choice = PolicyChoice(handle, self.context)
        self.replanning = Replanning(self.choice, self.context, run.loop.num_micro)
        self._requests = ProfileRequests(self.choice, handle.installation)
        self._tracking = TrackingSteps(self.choice, self.replanning, self.context)
        num_uncounted = run.loop.num_before_step(next(run.model.parameters()).device)
        self._peaks = PeakCheck(self.choice, self.replanning, self.context, num_uncounted)
        self._profiler, self._batches = run.profiler, run.batches
        self._builder = PolicyBuilder(run)
        self._report: SlowReport | None = None
        """Object that logs the current step if the step is slow. None in normal steps."""
        self._started = 0.0
        self._has_recorded = False
        """True if a micro-batch of the current step is, or was, recorded."""
        self._num_micro, self._num_begun = run.loop.num_micro, 0
        """Micro-batches per step that the profiles count, and micro-batches of the current step so far."""

    def begin_after_step(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        shapes = self._shapes_of(profile)
        self.choice.add(shapes, profile, policy, is_provisional)
        self._run.stats.estimate_early_overheads(profile, shapes)

    def begin_step(self, step: int) -> None:
        self._started = time.perf_counter()
        run, context = self._run, self.context
        context.step = step + 1
        self.choice.begin_step()
        self._num_begun = 0
        self._count_accumulation(run.loop.num_micro)
        is_due = is_tracking_step(context.step - context.policy_step, run.config.tracking)
        if is_due or context.guard.suspicion is not None:
            self._tracking.start()
        if context.must_measure and context.step > context.measure_after and not self._tracking.is_on:
            self._peaks.start(run.model, run.optimizer, self.handle.installation)
        self._report_slow_step()

    @property
    def activity(self) -> str:
        """Description of the current step for reports: how the blocks run, and the step's work in addition to training
        (see `FirstSteps`)."""
        current = self.choice.current
        if self._tracking.is_on:
            return TRACKING
        if self._peaks.is_on:
            return MEASURING
        if current is not None and (current.is_fresh or current.num_steps < RECORDED_STEPS):
            return CHECKING
        return FOLLOWING

    def _report_slow_step(self) -> None:
        """Begin a report on the current step, which does more than train.

        The report is logged only if the step takes more than twice as long as a normal step.
        """
        self._end_report()
        task, current = TASKS.get(self.activity), self.choice.current
        if task is None:
            return
        normal_ms = current.times.median_ms if current is not None else None
        if normal_ms is None and current is not None:
            normal_ms = current.replanner.profile.step_ms * self._run.loop.num_micro
        phase = f"step {self.context.step}, {task}"
        self._report = SlowReport(phase, 2e-3 * (normal_ms or 0.0))

    def _end_report(self, has_failed: bool = False) -> None:
        """End the report that `_report_slow_step` began for the current step, if there is a report."""
        if self._report is not None:
            self._report.end(has_failed)
            self._report = None

    def begin_micro_batch(self, inputs: Any) -> None:
        self._batches.begin()
        super().begin_micro_batch(inputs)
        self._num_begun += 1
        if num_ranks() == 1:
            self._count_accumulation(self._num_begun)
        self._choose(inputs)

    def _choose(self, inputs: Any) -> None:
        """Choose the policy for a micro-batch with the shapes of `inputs`, and apply the policy.

        Do nothing if the shapes of the micro-batch are known already, or if `inputs` is not a mapping.
        """
        if self._batches.read_shapes(inputs):
            self.choice.choose(self._batches.shapes, self._batches.nbytes)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run` and return its result. If memory runs out, call `run` again under a policy that needs less
        memory."""
        report = self._run.memory_report
        if not self._run.config.retry_out_of_memory:
            with memory_reported(report):
                return run()
        return run_with_retry(run, self._run.model, self.tighten, self.advice, report)

    def tighten(self) -> str | None:
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        self._cancel()
        obstacle = self.replanning.tighten(self.context.step)
        if obstacle is None:
            self.show()
        return obstacle

    def advice(self) -> str:
        return advice(self.choice.shown.replanner)

    def end_micro_batch(self) -> None:
        self._end_recorded()
        fallbacks = self.handle.tape_cache.fallbacks
        refuse_fallbacks(self._run.config, fallbacks)
        self._run.stats.add(*self.choice.end_micro_batch(fallbacks.counts))

    def begin_forward(self, inputs: Any) -> None:
        super().begin_forward(inputs)
        self._choose(inputs)
        profiler, run = self._profiler, self._run
        if self._has_recorded:
            profiler.enter_forward(inputs)
        elif self._is_to_be_recorded() and not profiler.must_wait(run.model):
            self.choice.suspend()
            handle, self._has_recorded = self.handle, True
            profiler.begin(handle.installation, run.optimizer, inputs, handle.tape_cache, handle.head)

    def _is_to_be_recorded(self) -> bool:
        """Return True if the micro-batch that begins is to be recorded for a profile."""
        requests, is_busy = self._requests, self._tracking.is_on or self._peaks.is_on or self._has_recorded
        if is_busy or not (requests.is_due or requests.num_tries > 0 or self.choice.wants_profile):
            return False
        return self._profiler.is_turn(self._num_begun, self._run.model)

    def note_loss(self, result: Any, inputs: Any) -> None:
        if self._has_recorded:
            self._profiler.end_forward(result[0] if isinstance(result, tuple) and result else result)

    def abandon_step(self) -> None:
        self._cancel()
        self._profiler.remove()

    def _cancel(self) -> None:
        """Stop the measurements of a step that has failed, and log how long the step took if it was slow."""
        self._end_report(has_failed=True)
        self._profiler.cancel()
        self._has_recorded = False
        self._tracking.cancel()
        self._peaks.close()

    def end_backward(self) -> None:
        """End the measurement of the step's memory. The optimizer's step is left out, because policies do not affect
        its memory."""
        self._end_recorded()
        if self._peaks.is_on:
            self._peaks.end_backward()

    def _end_recorded(self) -> None:
        if self._has_recorded:
            self._profiler.end_backward()

    def begin_optimizer_step(self) -> None:
        self.end_backward()
        if not self._profiler.optimizer.has_seen:  # in a resumed run
            self._run.watch_optimizer()

    def end_optimizer_step(self) -> None:
        if self._profiler.optimizer.meter is not None:
            self._profiler.optimizer.end()
        # The optimizer may step outside the session's contexts. Then the step ends with the next one, and what the
        # loop does until then, such as an evaluation, is not part of the step.
        self._end_report()

    def end_step(self, step: int) -> None:
        super().end_step(step)
        context, cache, history = self.context, self.choice.cache, self._run.history
        started, num_events = time.perf_counter(), len(history)
        has_changed, self.choice.has_replaced_borrowed = self.choice.has_replaced_borrowed, False
        self._add_time((started - self._started) * 1e3)
        is_due = any(size_policy.due is not None and step >= size_policy.due for size_policy in cache.all)
        is_busy = self._tracking.is_on or self._peaks.is_on or is_due
        if self._tracking.is_on:
            self._tracking.finish(step)
        self._end_report()  # what follows has reports of its own
        if self._peaks.is_on:
            has_changed |= self._peaks.compare(step)
            self._peaks.close()
        if is_busy:
            has_changed |= self.replanning.take_over(step)
        if self._run.num_without_state:
            has_changed |= self._count_state(step)
        num_steps = step - context.policy_step
        is_turn = num_steps % LOOK_STEPS == 0 or num_steps <= FIRST_LOOKS
        if self._has_recorded or self._requests.is_due or self._requests.num_tries:
            has_changed |= self._end_recording(step)
        if is_turn:
            self._requests.look()
        if has_changed:
            self.show()
        if has_changed or len(history) > num_events:
            self._run.save(has_changed)
        if is_busy or len(history) > num_events:
            context.extra_ms += (time.perf_counter() - started) * 1e3

    def _count_accumulation(self, num_micro: int) -> None:
        """Count the gradients and batches of earlier micro-batches if steps have more micro-batches than before."""
        before = self._num_micro
        if num_micro <= before:
            return
        self._num_micro = num_micro
        batch_bytes = max(self.choice.batch_bytes, self._batches.nbytes)
        extra_bytes = (num_micro - before) * batch_bytes + (self._run.gradient_bytes if before == 1 else 0)
        reason = f"steps have {num_micro} micro-batches, and not {before}"
        self.replanning.add_static(self.context.step, extra_bytes, reason)
        self.show()

    def _count_state(self, step: int) -> bool:
        """Count the state that the optimizer has created since the profile. Return True if there is any."""
        run, profiler = self._run, self._profiler
        counted, state_bytes = profiler.counted_state_bytes, profiler.state_bytes(run.model, run.optimizer)
        extra_bytes = max(gather_from_all_ranks(0 if counted is None else state_bytes - counted))
        run.num_without_state = 0 if extra_bytes or counted is None else run.num_without_state - 1
        profiler.counted_state_bytes = None if counted is None else state_bytes
        reason = f"the optimizer created {extra_bytes} bytes of state"
        if extra_bytes > 0:
            self.replanning.add_static(step, extra_bytes, reason, must_fit=True)
        return extra_bytes > 0

    def _add_time(self, step_ms: float) -> None:
        """Count the step for the policies that it used, and record `step_ms`: the time of a normal step, or, of a step
        with other work, what exceeds the median of normal steps."""
        current = self.choice.current
        for size_policy in self.choice.used():
            if size_policy is not None:
                size_policy.num_steps += 1
        if current is None or not self.choice.ran_alone() or current.num_steps <= RECORDED_STEPS:
            self.context.extra_ms += self._peaks.counting_ms if self._peaks.is_on else 0.0
        elif self._tracking.is_on or self._peaks.is_on or current.is_fresh:
            self.context.extra_ms += current.times.add_other(step_ms)
        else:
            self.context.extra_ms += current.times.add_normal(step_ms)
        if current is not None:
            current.is_fresh = False

    def _end_recording(self, step: int) -> bool:
        """Make a policy of the micro-batch that the step has recorded. Return True if a policy was set."""
        requests, called, self._has_recorded = self._requests, self._profiler.called, False
        is_restart, requests.is_due = requests.num_tries > 0, False
        profile = self._profiler.take(self._run.model, self._run.optimizer, is_largest=not is_restart)
        if is_restart:
            return self._restart(step, profile, called)
        return profile is not None and self._add_size(step, profile)

    def _add_size(self, step: int, measured: Profile) -> bool:
        """Add a policy for the sizes of the profile `measured`. Return False if no policy fits."""
        cache, sizes = self.choice.cache, self._shapes_of(measured) or ()
        try:
            profile, policy = self._builder.later(cache.with_other_sizes(measured), self.choice)
            if policy.idle_blocks - cache.idle_blocks:
                raise RefusedSizeError("they train fewer blocks, and a policy needs all of them")
        except RefusedSizeError as reason:
            log.warning("Adacc: batches of %s get no policy of their own: %s", describe(sizes), reason)
            cache.refuse(sizes)
            self._run.note(MemoryNoted(step=step, reason=f"{describe(sizes)}: {reason}"))
            return False
        self.choice.add(sizes, profile, policy)
        self._note_policy(step, f"for batches of {describe(sizes)}", policy, profile)
        return True

    def _restart(self, step: int, measured: Profile | None, called: set[str]) -> bool:
        """Replace all policies by a policy of the profile `measured`, because the model runs other operators or trains
        more blocks now. `called` are the calls that this rank recorded. Return False if blocks are missing or no policy
        fits."""
        requests = self._requests
        if not requests.can_restart(called) or measured is None:
            if requests.num_tries == 0:
                self._report_failed_restart(step, "no batch came that calls all of them")
            return False
        requests.num_tries = 0
        cache = self.choice.cache
        try:
            profile, policy = self._builder.later(measured, self.choice)
        except RefusedSizeError as reason:
            self._report_failed_restart(step, str(reason))
            return False
        self._cancel()
        cache.clear()
        requests.restarted()
        self.choice.add(self._shapes_of(profile), cache.with_other_sizes(profile), policy)
        self._note_policy(step, requests.why, policy, profile)
        return True

    def _note_policy(self, step: int, reason: str, policy: Policy, profile: Profile) -> None:
        self._run.note(PolicySet(step=step, reason=reason, **predictions(policy)))
        announce("Adacc: policy set, %s: %s", reason, describe_costs(policy, profile))

    def _report_failed_restart(self, step: int, obstacle: str) -> None:
        """Warn that the run keeps its policies because of `obstacle`."""
        why = self._requests.why
        reason = f"{why}, which stay {FALLBACK_MODES[why]}: {obstacle}"
        log.warning("Adacc: %s", reason)
        self._run.note(MemoryNoted(step=step, reason=reason))

    def _shapes_of(self, profile: Profile) -> BatchShapes | None:
        """Return the sizes of the batch that was profiled, or None if the sizes are unknown."""
        return from_profile_shapes(profile.measured[0][0]) or None

    def show(self) -> None:
        """Set the run's policy and profile to the policy and profile of the most recent micro-batch."""
        replanner = self.choice.shown.replanner
        self._run.show(replanner.policy, replanner.priced)

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        """Return the metrics to add to `logs`, the training loop's metrics at the current step.

        If all ranks log (`is_on_all_ranks`) and the loss or gradient norm in `logs` is suspicious, the next step
        compares gradients under compression with exact gradients.
        """
        if is_on_all_ranks:
            is_lossy = any(size_policy.replanner.has_work() for size_policy in self.choice.cache.all)
            self.context.guard.logged(logs, is_lossy)
        shown = self.choice.shown
        is_exact, peak = not shown.replanner.has_work(), shown.measured_peak_bytes
        own = {
            "adacc/measured_peak_gib": None if peak is None else peak / 2**30,
            "adacc/error": 0.0 if is_exact else shown.error,
            "adacc/gradient_error": 0.0 if is_exact else shown.gradient_error,
            "adacc/tracking_ms": self.context.extra_ms,
        }
        figures = super().figures(logs, is_on_all_ranks)
        return figures | {name: value for name, value in own.items() if value is not None}

    def _saved(self) -> Saved:
        context, guard, shown = self.context, self.context.guard, self.choice.shown
        others = [other for other in self.choice.cache.all if other is not shown]
        return Saved(
            size_policies=[size_policy.saved() for size_policy in (shown, *others)],
            policy_step=context.policy_step,
            memory_budget=context.config.memory_budget,
            host_memory=context.config.host_memory,
            tightened=context.tightened,
            history=self._run.history,
            losses=guard.losses,
            suspicion=guard.suspicion,
            switched_off=sorted(guard.switched_off),
            is_unproven=guard.is_unproven,
            tracking_ms=context.extra_ms,
            step=self._run.step,
            missing_bytes=dict(context.missing_bytes),
            counted_elements=context.counted_elements,
            num_micro=self._num_micro,
            model_settings=self._run.model_settings,
        )

    def resume(self, saved: Saved) -> None:
        """Restore the state of the run from the checkpoint's state `saved`.

        If the solver was running for a policy when the state was saved, start the solver again.
        """
        context = self.context
        self._num_micro = saved.num_micro or self._num_micro
        context.extra_ms, context.tightened = saved.tracking_ms, saved.tightened
        context.missing_bytes, context.counted_elements = dict(saved.missing_bytes), saved.counted_elements
        context.guard = LossGuard(context.config, saved.losses, saved.switched_off)
        context.guard.suspicion, context.guard.is_unproven = saved.suspicion, saved.is_unproven
        for record in reversed(saved.size_policies):
            if record.profile is not None:  # without its file, the policy is made again when its size comes
                added = self.choice.add(record.shapes, record.profile, record.policy, is_extrapolated=record.is_told)
                added.resume(record)

    def remove(self) -> None:
        self._cancel()
        self._profiler.remove()
        super().remove()
