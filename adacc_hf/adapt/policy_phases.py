"""FixedPolicyPhase, AdaptivePhase: training under a policy, unchanged or adapted to the data and the batch sizes.

NOTE [Timetable of a step]. All ranks do the same at the same step. Part 2 runs in every step, and parts 1 and 3 only
when they are due.
1. Step begins: if a tracking step is due, the measurement of outliers and gradient errors starts. Otherwise, if the
   policy has changed, the measurement of the step's memory starts.
2. Micro-batch: the policy for the micro-batch's size is applied (policy_choice.py). If memory runs out, the micro-batch
   runs again under a tighter policy.
3. Step ends: measurements correct the run's predictions (tracking.py, peak_check.py, corrections.py), and the policy
   in use is solved again if it then exceeds the budget; other sizes follow when they come. A micro-batch of the next
   step is recorded for a batch size without a policy. If the model now trains more blocks than the profile contains, or
   calls them more often or in another order, or runs other operators, the run begins again with its warm-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import Saved, save_in_checkpoint
from adacc_hf.adapt.history import describe_costs, describe_fallbacks, predictions
from adacc_hf.adapt.oom_retry import TIGHTER, run_with_retry, tighter_budget
from adacc_hf.adapt.peak_check import PeakCheck
from adacc_hf.adapt.policy_checks import refuse_fallbacks
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.policy_fit import distinct
from adacc_hf.adapt.run_state import Phase, RunState, check_called
from adacc_hf.adapt.tracking import Tracking, lossy_blocks
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import describe
from adacc_hf.torch_glue.distributed import gather_from_all_ranks, num_ranks
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.progress import announce

log = logging.getLogger(__name__)

LOOK_STEPS, FIRST_LOOKS = 16, 8
"""Number of steps after which all ranks decide together, by a collective, if a batch is to be recorded. They also do so
at each of the first FIRST_LOOKS steps."""
MOST_RESTARTS = 4
"""Number of times that a run may begin again with its warm-up, because the model runs other blocks or operators."""
MORE_BLOCKS = "more blocks or parameters are trained than before"
OTHER_ORDER = "blocks are called more often, or in another order, than in the profiled step"
OTHER_OPERATORS = "most batches run other operators than the profiled one"


class FixedPolicyPhase(Phase):
    """Phase of a run that trains under a fixed policy, which is not adapted to the data."""

    def __init__(self, run: RunState, handle: PolicyHandle) -> None:
        super().__init__(run)
        self.handle = handle
        self._must_check = True
        self._has_forward = False

    def begin_forward(self, inputs: Any) -> None:
        self._has_forward = True

    def begin_micro_batch(self, inputs: Any) -> None:
        self.handle.installation.begin_step()
        self.handle.tape_cache.fallbacks.clear()

    def end_micro_batch(self) -> None:
        fallbacks = self.handle.tape_cache.fallbacks
        if fallbacks:
            refuse_fallbacks(self._run.config, fallbacks)
        self._run.fallbacks.update({reason: blocks.total() for reason, blocks in fallbacks.items()})

    def end_step(self, step: int) -> None:
        if self._run.fallbacks:
            self._run.count_step()
        if self._must_check and self._has_forward:  # a loop may skip the first batches
            self._must_check = False
            check_called(self.handle.installation)

    def figures(self, logs: dict[str, float]) -> dict[str, float]:
        run, policy = self._run, self._run.active_policy
        figures = {
            "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
            "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
            "adacc/overhead_ms": policy.predicted_overhead_ms,
        }
        if policy.predicted_host_bytes:
            figures["adacc/host_gib"] = policy.predicted_host_bytes / 2**30
            figures["adacc/measured_host_gib"] = host_pool.take_peak() / 2**30
        if run.profile is not None:
            figures["adacc/compression_rate"] = policy.predicted_stored_bytes / run.profile.plain_stored_bytes
        return figures | run.fallback_figures()

    def save(self, folder: Path) -> None:
        save_in_checkpoint(folder, self._saved(), self._run.profile)
        self._run.save()

    def _saved(self) -> Saved:
        run = self._run
        return Saved(
            policies=[run.active_policy],
            settings=run.config.describe_changes(),
            history=run.history,
            step=run.step,
            batches=None if run.byte_batches is None else run.byte_batches.to_json(),
        )

    def ends(self) -> None:
        run = self._run
        run.save()
        announce("Adacc: %s", " ".join(describe_fallbacks(run.history)))

    def remove(self) -> None:
        self.handle.remove()


class AdaptivePhase(FixedPolicyPhase):
    """Phase of a run that adapts its policies to the data and to the batch sizes: the controller of the run."""

    def __init__(
        self,
        run: RunState,
        handle: PolicyHandle,
        profile: Profile,
        policy: Policy,
        warm_up: Callable[[str], Phase],
    ) -> None:
        """Follow the run's first `policy`, made for `profile`. `warm_up` makes the phase in which the run begins again,
        for a reason."""
        super().__init__(run, handle)
        self.choice = PolicyChoice(handle, run)
        self._profiler = run.profiler
        self._warm_up = warm_up
        self._is_alone = num_ranks() == 1
        self._num_before = run.num_steps
        """Number of finished steps of the run before this phase."""
        self._num_micro = run.loop.num_micro
        """Micro-batches per step that the predictions count."""
        self._has_other_order = False
        """True if a micro-batch of the step has called the blocks in another order than the profile contains."""
        handle.installation.on_other_order = self._note_other_order
        self._parameters = list(run.model.parameters())
        self._num_trained = _num_trained(self._parameters)  # in the profiled step
        self._is_due = False
        """True if all ranks record a micro-batch of the next step, because a rank has a batch without a policy."""
        self._num_begun = 0
        """Number of the current step's micro-batches so far."""
        record = self.choice.add(profile, policy)
        record.num_waiting = int(run.budget(profile).limits_peak and self._profiler.has_inner_steps)
        self._tracking = Tracking(self.choice, run, run.step - 1)  # tracking steps count from the profiled step
        self._peaks = PeakCheck(self.choice, run)

    def begin_step(self, step: int) -> None:
        self.choice.begin_step()
        self._num_begun = 0
        self._count_accumulation(self._run.loop.num_micro)
        if self._run.current_step >= self._tracking.due_step:
            self._tracking.start()
        if self.choice.shown.must_measure and not self._tracking.is_on and step >= self._peaks.first_step:
            self._peaks.start(self.handle)

    def begin_micro_batch(self, inputs: Any) -> None:
        has_more = self._is_alone and self._num_begun == 0 and _num_trained(self._parameters) > self._num_trained
        if has_more and self._restart(MORE_BLOCKS):
            self._run.phase.begin_micro_batch(inputs)
            return
        self.choice.begin_micro_batch()
        super().begin_micro_batch(inputs)
        self._num_begun += 1
        if self._is_alone:
            self._count_accumulation(self._num_begun)
        self.choice.read(inputs)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run` and return its result. If memory runs out, call it again under a policy that needs less."""
        state, retries = self._run, self._run.config.retry_out_of_memory
        return run_with_retry(run, state.model, self._tighten, self._advice, state.memory_report, retries)

    def _tighten(self) -> str | None:
        """Follow a policy that needs less memory. Return None, or the reason why there is no such policy."""
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        self._cancel()
        record = self.choice.current
        if not self._is_alone:
            return "the other ranks are in the middle of it"
        if record is None:
            return "it ran under full recomputation already"
        before, budget = record.policy, tighter_budget(record.policy, record.profile, self._run.budget(record.profile))
        self._run.corrections.tighten(budget)
        self.choice.refresh(record)
        if len(distinct([before, record.policy])) == 1:
            return "no policy needs less memory"
        reason = f"out of memory: from now on memory_budget={budget}"
        self._run.note("memory", reason=reason, **predictions(record.policy))
        return None

    def _advice(self) -> str:
        """Return a sentence for the error message: which settings would make a step fit in memory."""
        needed = self.choice.shown.policy.predicted_peak_bytes
        return (
            f"Adacc planned a peak of {needed} bytes for memory_budget={self._run.corrections.memory_budget!r}: set "
            f"memory_budget={int(needed * TIGHTER)} or less, or use a smaller batch or shorter sequences"
        )

    def end_micro_batch(self) -> None:
        if self._profiler.live is not None:
            self._profiler.end_backward()
        super().end_micro_batch()
        self.choice.end_micro_batch(self.handle.tape_cache.fallbacks)

    def begin_forward(self, inputs: Any) -> None:
        super().begin_forward(inputs)
        self.choice.read(inputs)
        profiler, run, parameters = self._profiler, self._run, self._parameters
        if self._is_alone and self._num_micro == self._num_begun == 1 and any(p.grad is not None for p in parameters):
            installation = self.handle.installation
            if len(installation.skipped_blocks()) == len(installation.blocks):
                self._count_accumulation(2, "gradients are kept from step to step")
        if profiler.live is not None:
            profiler.enter_forward(inputs)
        elif self._is_to_be_recorded():
            self._peaks.close()  # on a CPU, only one profiler may run
            if profiler.must_wait(run.model):
                return
            self.choice.suspend()
            handle = self.handle
            profiler.begin(handle.installation, run.optimizer, inputs, handle.tape_cache, handle.head)

    def _is_to_be_recorded(self) -> bool:
        """Return True if the micro-batch that begins is to be recorded for a profile."""
        is_wanted = self.choice.is_unpredicted if self._is_alone else self._is_due
        return is_wanted and not self._tracking.is_on and self._profiler.is_turn(self._num_begun, self._run.model)

    def abandon_step(self) -> None:
        self._cancel()
        super().abandon_step()

    def _cancel(self) -> None:
        """Stop the measurements of a step that has failed."""
        self._profiler.cancel()
        self._tracking.cancel()
        self._peaks.close()

    def end_backward(self) -> None:
        super().end_backward()
        if self._peaks.is_on:
            self._peaks.meter.end_backward()

    def _note_other_order(self) -> None:
        """Warn of the memory of the micro-batch, before it is taken, and begin again after the step."""
        if self._profiler.live is None:
            self._has_other_order = True
            budget = self._run.budget(self.choice.shown.profile)
            if budget.limits_peak:
                text = f"{OTHER_ORDER}: the step may take more than memory_budget={budget.setting!r} allows"
                self._run.warn_of_memory(text, key=OTHER_ORDER)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        run, choice = self._run, self.choice
        has_other_order, self._has_other_order = self._has_other_order, False
        if has_other_order and self._is_alone and self._restart(OTHER_ORDER):
            return
        if self._tracking.is_on:
            self._tracking.finish()
        if self._peaks.is_on:
            self._peaks.compare(step)
            self._peaks.close()
        if run.num_without_state:
            self._count_state()
        if self._profiler.live is not None or self._is_due:
            self._end_recording()
        if choice.has_changed:
            run.save()
        num_steps = run.num_steps - self._num_before
        is_regular = num_steps % LOOK_STEPS == 0
        if is_regular or num_steps <= FIRST_LOOKS:
            self._look(is_regular)

    def _count_accumulation(self, num_micro: int, reason: str = "") -> None:
        """Count the gradients and batches of earlier micro-batches if steps have more micro-batches than before."""
        before = self._num_micro
        if num_micro <= before:
            return
        self._num_micro = num_micro
        trained = (parameter for parameter in self._run.model.parameters() if parameter.requires_grad)
        extra_bytes = (num_micro - before) * max(self.choice.batch_bytes, self.choice.nbytes)
        extra_bytes += distinct_bytes(trained) if before == 1 else 0
        self.add_static(extra_bytes, reason or f"steps have {num_micro} micro-batches, and not {before}")

    def _count_state(self) -> None:
        """Count the state that the optimizer has created since the profile."""
        run, profiler = self._run, self._profiler
        counted, state_bytes = profiler.counted_state_bytes, profiler.state_bytes(run.model, run.optimizer)
        extra_bytes = max(gather_from_all_ranks(0 if counted is None else state_bytes - counted))
        is_over, is_counted = extra_bytes > 0 or counted is None, state_bytes > 0 or not self._is_alone
        run.num_without_state = 0 if is_over else run.num_without_state - is_counted
        profiler.counted_state_bytes = None if counted is None else state_bytes
        if extra_bytes > 0:
            self.add_static(extra_bytes, f"the optimizer created {extra_bytes} bytes of state")

    def add_static(self, extra_bytes: int, reason: str) -> None:
        """Count bytes that live throughout training from now on."""
        self._run.corrections.static_bytes += extra_bytes
        self._run.corrections.changed(reason)
        self.choice.refresh(self.choice.shown)

    def _look(self, is_regular: bool) -> None:
        """Decide with all ranks what to record next. If `is_regular`, decide also on other operators."""
        choice, blocks = self.choice, self.handle.installation.blocks
        more_train = _num_trained(self._run.model.parameters()) > self._num_trained
        has_more = more_train or any(blocks[name].num_calls for name in choice.idle_blocks)
        own = choice.is_unpredicted, has_more, is_regular and choice.most_diverged(), self._tracking.logged
        unpredicted, more, diverged, reasons = zip(*gather_from_all_ranks(own), strict=True)
        self._tracking.suspect(reasons)
        self._is_due, has_more, has_diverged = any(unpredicted), any(more), any(diverged)
        if has_more or has_diverged:
            self._restart(MORE_BLOCKS if has_more else OTHER_OPERATORS)

    def _restart(self, reason: str) -> bool:
        """Begin again with the warm-up, because of `reason`, except after MOST_RESTARTS. Return True if so."""
        run = self._run
        if run.num_restarts == MOST_RESTARTS:
            return False
        run.num_restarts += 1
        self.remove()
        run.phase = self._warm_up(reason)
        return True

    def _end_recording(self) -> None:
        """Add a policy for the sizes of the recorded micro-batch. Warn if this micro-batch trained fewer blocks."""
        run, choice = self._run, self.choice
        self._is_due = False
        profile = self._profiler.take(run.model, run.optimizer, is_largest=True)
        if profile is None:
            return
        sizes = describe(profile.measured[0][0])
        trained = {block.name for block in profile.blocks}
        if any(name not in trained for record in choice.records.values() for name, _ in record.policy.blocks):
            choice.num_profiles += 1
            reason = "they train fewer blocks, and a policy needs all of them"
            run.warn_of_memory(f"batches of {sizes} get no policy of their own: {reason}")
            return
        record = choice.add(profile)
        run.note("policy", reason=f"for batches of {sizes}", **predictions(record.policy))
        announce("Adacc: policy set, for batches of %s: %s", sizes, describe_costs(record.policy, record.profile))

    def figures(self, logs: dict[str, float]) -> dict[str, float]:
        """Return the metrics to add to `logs`. If the loss or gradient norm in `logs` is suspicious, the next step
        compares gradients under compression with exact gradients: with several ranks, the next step after they have
        exchanged their suspicions."""
        self._tracking.read_logs(logs)
        shown = self.choice.shown
        is_exact, peak = not lossy_blocks(shown.policy), shown.measured_peak_bytes
        own = {
            "adacc/measured_peak_gib": None if peak is None else peak / 2**30,
            "adacc/error": 0.0 if is_exact else shown.error,
            "adacc/gradient_error": 0.0 if is_exact else shown.gradient_error,
        }
        figures = super().figures(logs)
        return figures | {name: value for name, value in own.items() if value is not None}

    def _saved(self) -> Saved:
        shown = self.choice.shown
        policies = [shown.policy, *(record.policy for record in self.choice.records.values() if record is not shown)]
        return replace(super()._saved(), policies=distinct(policies), corrections=self._run.corrections.to_json())

    def remove(self) -> None:
        self._cancel()
        self._profiler.remove()
        super().remove()


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.requires_grad for parameter in parameters)
