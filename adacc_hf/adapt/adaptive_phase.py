"""AdaptivePhase: training under policies that are adapted to the data and to the batch sizes during the run.

NOTE [Timetable of a step]. All ranks do the same at the same step. Part 2 runs in every step, and parts 1 and 3 only
when they are due.
1. Step begins: if a tracking step is due, the measurement of outliers and gradient errors starts. Otherwise, if the
   policy has changed, the measurement of the step's memory starts.
2. Micro-batch: the policy for the micro-batch's size is applied (policy_choice.py). If memory runs out, the micro-batch
   runs again under a tighter policy.
3. Step ends: measurements correct the run's predictions (tracking.py, peak_check.py, corrections.py), and the policy
   in use is solved again if it then exceeds the budget; other sizes follow when they come. A micro-batch of the next
   step is recorded for a batch size without a policy, or if the model now trains more blocks than the profile contains,
   or runs other operators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adacc_hf.adapt.checkpoint_files import Saved
from adacc_hf.adapt.events import MemoryNoted, PolicySet, predictions
from adacc_hf.adapt.fallback_stats import describe_costs
from adacc_hf.adapt.fixed_policy_phase import FixedPolicyPhase
from adacc_hf.adapt.oom_retry import advice, run_with_retry, tighter_budget
from adacc_hf.adapt.peak_check import PeakCheck
from adacc_hf.adapt.policy_checks import refuse_fallbacks
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_fit import distinct
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.size_policy import RECORDED_STEPS
from adacc_hf.adapt.tracking import Tracking, lossy_blocks
from adacc_hf.artifacts.call_names import block_of_call
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import describe
from adacc_hf.torch_glue.distributed import gather_from_all_ranks, num_ranks
from adacc_hf.torch_glue.progress import announce, reported_if_slow

log = logging.getLogger(__name__)

LOOK_STEPS, FIRST_LOOKS = 16, 8
"""Number of steps after which all ranks decide together, by collectives, if a batch is to be recorded. They also do so
at each of the first FIRST_LOOKS steps."""
MOST_TRIES = 64
"""Number of steps in which the run waits for a batch from which all policies can be made anew. Each of these steps
takes a collective."""
MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
FALLBACK_MODES = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""Reasons to profile a batch again and replace all policies (a restart), and how block calls without a plan run until
then."""


class AdaptivePhase(FixedPolicyPhase):
    """Phase of a run that adapts its policies to the data and to the batch sizes: the controller of the run."""

    def __init__(self, run: RunState, handle: PolicyHandle, profile: Profile, policy: Policy) -> None:
        """Begin to follow the run's first `policy`, made for `profile`, after the end of the profiled step."""
        super().__init__(run, handle)
        self.choice = PolicyChoice(handle, run)
        self._tracking = Tracking(self.choice, run, run.step - 1)  # tracking steps count from the profiled step
        self._peaks = PeakCheck(self.choice, run)
        self._profiler = run.profiler
        self._num_micro = run.loop.num_micro
        """Micro-batches per step that the predictions count."""
        self._started = 0.0
        self._has_recorded = False
        """True if a micro-batch of the current step is, or was, recorded."""
        self._is_due = False
        """True if all ranks record a micro-batch of the next step, because a rank has a batch without a policy."""
        self._restart_reason, self._num_tries = "", 0
        """Reason for a restart, and the number of further steps that wait for its batch, 0 if none is planned."""
        self._tried: set[str] = set()
        """Reasons for which a restart was tried. They do not lead to another one."""
        self._num_begun = 0
        """Number of the current step's micro-batches so far."""
        record = self.choice.add(profile, policy)
        limits_peak = run.budget(record.profile).limits_peak
        self.choice.is_provisional = limits_peak and not run.corrections.counted_elements
        self.choice.must_measure = limits_peak
        record.num_waiting = int(limits_peak and self._profiler.inner_steps.has_detected)

    def begin_step(self, step: int) -> None:
        self._started = time.perf_counter()
        self.choice.begin_step()
        self._num_begun = 0
        self._count_accumulation(self._run.loop.num_micro)
        if self._tracking.is_due(step + 1):
            self._tracking.start()
        if self._peaks.is_due and not self._tracking.is_on:
            self._peaks.start(self.handle)

    def begin_micro_batch(self, inputs: Any) -> None:
        self.choice.begin_micro_batch()
        super().begin_micro_batch(inputs)
        self._num_begun += 1
        if num_ranks() == 1:
            self._count_accumulation(self._num_begun)
        self.choice.read(inputs)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run` and return its result. If memory runs out, call it again under a policy that needs less."""
        state, retries = self._run, self._run.config.retry_out_of_memory
        return run_with_retry(run, state.model, self.tighten, self.advice, state.memory_report, retries)

    def tighten(self) -> str | None:
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        self._cancel()
        record, step = self.choice.current, self._run.current_step
        if num_ranks() > 1:
            return "the other ranks are in the middle of it"
        if record is None:
            return "it ran under full recomputation already"
        budget = tighter_budget(record.policy, record.profile, self._run.budget(record.profile))
        try:
            with reported_if_slow(f"step {step}: solving for memory_budget={budget}, because memory ran out"):
                policy = self.choice.tighten(budget)
        except InfeasibleBudgetError as error:
            return f"no policy needs that much less: {error}"
        reason = f"out of memory: from now on memory_budget={budget}"
        self._run.note(MemoryNoted(step=step, reason=reason, **predictions(policy)))
        self.show()
        return None

    def advice(self) -> str:
        return advice(self.choice.shown.policy, self._run.corrections.memory_budget)

    def end_micro_batch(self) -> None:
        self._end_recorded()
        fallbacks = self.handle.tape_cache.fallbacks
        refuse_fallbacks(self._run.config, fallbacks)
        self._run.stats.add(*self.choice.end_micro_batch(fallbacks.counts))

    def begin_forward(self, inputs: Any) -> None:
        super().begin_forward(inputs)
        self.choice.read(inputs)
        profiler, run = self._profiler, self._run
        if self._has_recorded:
            profiler.enter_forward(inputs)
        elif self._is_to_be_recorded() and not profiler.must_wait(run.model):
            self.choice.suspend()
            handle, self._has_recorded = self.handle, True
            profiler.begin(handle.installation, run.optimizer, inputs, handle.tape_cache, handle.head)

    def _is_to_be_recorded(self) -> bool:
        """Return True if the micro-batch that begins is to be recorded for a profile."""
        if self._tracking.is_on or self._peaks.is_on or self._has_recorded:
            return False
        is_wanted = num_ranks() == 1 and self.choice.is_unpredicted
        if not (self._is_due or self._num_tries > 0 or is_wanted):
            return False
        return self._profiler.is_turn(self._num_begun, self._run.model)

    def note_loss(self, result: Any, inputs: Any) -> None:
        if self._has_recorded:
            self._profiler.end_forward(result[0] if isinstance(result, tuple) and result else result)

    def abandon_step(self) -> None:
        self._cancel()
        self._profiler.remove()

    def _cancel(self) -> None:
        """Stop the measurements of a step that has failed."""
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

    def end_step(self, step: int) -> None:
        super().end_step(step)
        run, choice, history = self._run, self.choice, self._run.history
        started, num_events = time.perf_counter(), len(history)
        self._add_time((started - self._started) * 1e3)
        is_busy = self._tracking.is_on or self._peaks.is_on
        if self._tracking.is_on:
            self._tracking.finish(step)
        if self._peaks.is_on:
            self._peaks.compare(step)
            self._peaks.close()
        if run.num_without_state:
            self._count_state()
        if self._has_recorded or self._is_due or self._num_tries:
            self._end_recording(step)
        num_steps = step - self._tracking.policy_step
        is_regular = num_steps % LOOK_STEPS == 0
        if is_regular or num_steps <= FIRST_LOOKS:
            self._look(is_regular)
        if choice.has_changed:
            self.show()
            run.save()
        if is_busy or len(history) > num_events:
            run.extra_ms += (time.perf_counter() - started) * 1e3

    def _count_accumulation(self, num_micro: int) -> None:
        """Count the gradients and batches of earlier micro-batches if steps have more micro-batches than before."""
        before = self._num_micro
        if num_micro <= before:
            return
        self._num_micro = num_micro
        batch_bytes = max(self.choice.batch_bytes, self.choice.nbytes)
        extra_bytes = (num_micro - before) * batch_bytes + (self._run.gradient_bytes if before == 1 else 0)
        self.add_static(extra_bytes, f"steps have {num_micro} micro-batches, and not {before}")

    def _count_state(self) -> None:
        """Count the state that the optimizer has created since the profile."""
        run, profiler = self._run, self._profiler
        counted, state_bytes = profiler.counted_state_bytes, profiler.state_bytes(run.model, run.optimizer)
        extra_bytes = max(gather_from_all_ranks(0 if counted is None else state_bytes - counted))
        run.num_without_state = 0 if extra_bytes or counted is None else run.num_without_state - 1
        profiler.counted_state_bytes = None if counted is None else state_bytes
        if extra_bytes > 0:
            self.add_static(extra_bytes, f"the optimizer created {extra_bytes} bytes of state", must_fit=True)

    def add_static(self, extra_bytes: int, reason: str, must_fit: bool = False) -> None:
        """Count bytes that live throughout training from now on. Raise InfeasibleBudgetError if `must_fit` and no
        policy for the latest size fits the budget with them."""
        self._run.corrections.static_bytes += extra_bytes
        self._run.corrections.changed(reason)
        self.choice.refresh(self.choice.shown, must_fit)
        self.show()

    def _add_time(self, step_ms: float) -> None:
        """Count the step for the policies that it used, and record `step_ms`: the time of a normal step, or, of a step
        with other work, what exceeds the median of normal steps."""
        current = self.choice.current
        for record in self.choice.used():
            if record is not None:
                record.num_steps += 1
        if current is None or not self.choice.ran_alone() or current.num_steps <= RECORDED_STEPS:
            self._run.extra_ms += self._peaks.counting_ms if self._peaks.is_on else 0.0
        elif self._tracking.is_on or self._peaks.is_on or current.is_fresh:
            self._run.extra_ms += current.times.add_other(step_ms)
        else:
            self._run.extra_ms += current.times.add_normal(step_ms)
        if current is not None:
            current.is_fresh = False

    def _look(self, is_regular: bool) -> None:
        """Decide at a step's end, with all ranks, what to record next. If `is_regular`, many batches have come since
        the last decision on other operators."""
        if num_ranks() > 1:
            self._is_due = any(gather_from_all_ranks(self.choice.is_unpredicted))
        idle, blocks = self.choice.idle_blocks, self.handle.installation.blocks
        reasons = {MORE_BLOCKS: any(blocks[name].num_calls for name in idle)} if idle else {}
        if is_regular:
            reasons[OTHER_OPERATORS] = self.choice.most_diverged()
        for reason, is_mine in reasons.items():
            if reason not in self._tried and any(gather_from_all_ranks(is_mine)):
                self._restart_reason, self._num_tries = reason, MOST_TRIES
                self._tried.add(reason)

    def _end_recording(self, step: int) -> None:
        """Make a policy of the micro-batch that the step has recorded."""
        called, self._has_recorded, self._is_due = self._profiler.called, False, False
        is_restart = self._num_tries > 0
        profile = self._profiler.take(self._run.model, self._run.optimizer, is_largest=not is_restart)
        if is_restart:
            self._restart(step, profile, called)
        elif profile is not None:
            self._add_size(step, profile)

    def _add_size(self, step: int, profile: Profile) -> None:
        """Add a policy for the sizes of a recorded profile. Warn if it trains fewer blocks than the others."""
        sizes = describe(profile.measured[0][0])
        trained = {block.name for block in profile.blocks}
        if any(name not in trained for record in self.choice.records.values() for name, _ in record.policy.blocks):
            self.choice.num_profiles += 1
            reason = "they train fewer blocks, and a policy needs all of them"
            log.warning("Adacc: batches of %s get no policy of their own: %s", sizes, reason)
            self._run.note(MemoryNoted(step=step, reason=f"{sizes}: {reason}"))
            return
        record = self.choice.add(profile)
        self._note_policy(step, f"for batches of {sizes}", record.policy, record.profile)

    def _restart(self, step: int, profile: Profile | None, called: set[str]) -> None:
        """Replace all policies by a policy of the recorded `profile`, because the model runs other operators or trains
        more blocks now. `called` are the calls that this rank recorded.

        The micro-batch must have called every block that the model has called with gradients so far.
        """
        self._num_tries -= 1
        installation, blocks = self.handle.installation, {block_of_call(name) for name in called}
        is_whole = not (installation.blocks.keys() - blocks).difference(installation.uncalled())
        if not all(gather_from_all_ranks(bool(called) and is_whole)) or profile is None:
            if self._num_tries == 0:
                self._report_failed_restart(step, "no batch came that calls all of them")
            return
        self._num_tries = 0
        try:
            policy = self.choice.fit.solved(profile, self._run.corrections.memory_budget)
        except InfeasibleBudgetError as error:
            self._report_failed_restart(step, str(error))
            return
        self._cancel()
        self.choice.clear()
        self._tried.discard(MORE_BLOCKS)
        self.choice.add(profile, policy)
        self._note_policy(step, self._restart_reason, policy, profile)

    def _note_policy(self, step: int, reason: str, policy: Policy, profile: Profile) -> None:
        self._run.note(PolicySet(step=step, reason=reason, **predictions(policy)))
        announce("Adacc: policy set, %s: %s", reason, describe_costs(policy, profile))

    def _report_failed_restart(self, step: int, obstacle: str) -> None:
        """Warn that the run keeps its policies because of `obstacle`."""
        why = self._restart_reason
        reason = f"{why}, which stay {FALLBACK_MODES[why]}: {obstacle}"
        log.warning("Adacc: %s", reason)
        self._run.note(MemoryNoted(step=step, reason=reason))

    def show(self) -> None:
        """Set the run's policy and profile to the policy and profile of the most recent micro-batch."""
        self._run.show(self.choice.shown.policy, self.choice.shown.profile)

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        """Return the metrics to add to `logs`, the training loop's metrics at the current step.

        If all ranks log (`is_on_all_ranks`) and the loss or gradient norm in `logs` is suspicious, the next step
        compares gradients under compression with exact gradients.
        """
        if is_on_all_ranks:
            is_lossy = any(lossy_blocks(record.policy) for record in self.choice.records.values())
            self._tracking.guard.logged(logs, is_lossy)
        shown = self.choice.shown
        is_exact, peak = not lossy_blocks(shown.policy), shown.measured_peak_bytes
        own = {
            "adacc/measured_peak_gib": None if peak is None else peak / 2**30,
            "adacc/error": 0.0 if is_exact else shown.error,
            "adacc/gradient_error": 0.0 if is_exact else shown.gradient_error,
            "adacc/tracking_ms": self._run.extra_ms,
        }
        figures = super().figures(logs, is_on_all_ranks)
        return figures | {name: value for name, value in own.items() if value is not None}

    def _saved(self) -> Saved:
        shown = self.choice.shown
        policies = [shown.policy, *(record.policy for record in self.choice.records.values() if record is not shown)]
        return replace(
            super()._saved(),
            policies=distinct(policies),
            corrections=self._run.corrections.to_json(),
        )

    def remove(self) -> None:
        self._cancel()
        self._profiler.remove()
        super().remove()
