"""Phases of a run under a session, each with its handlers of a training loop's events.

NOTE [Phases of a run]
| phase | blocks run under | begins | ends |
|---|---|---|---|
| Phase | nothing | before and after a run | `AdaccSession.begin` |
| WarmUpPhase | torch's checkpoint | a run without a policy | the first policy: before a forward, or after a step |
| FixedPolicyPhase | the user's policy, as it is | such a policy, or its checkpoint | the run's end |
| AdaptivePhase | policies that follow the data | the first solved policy, or its checkpoint | the run's end |
| Compiled | compiled graphs (callbacks/compiled_phase.py) | a model compiled as a whole | the run's end |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adacc_hf.adapt.checkpoint_files import Saved, SavedSizePolicy, save_in_checkpoint
from adacc_hf.adapt.controller import Controller
from adacc_hf.adapt.events import MemoryNoted, PolicySet, predictions
from adacc_hf.adapt.full_recompute import FullRecompute, is_ready
from adacc_hf.adapt.metrics import metrics
from adacc_hf.adapt.micro_batches import MicroBatches
from adacc_hf.adapt.oom_retry import run_with_retry
from adacc_hf.adapt.policy_builder import PolicyBuilder, RefusedSizeError
from adacc_hf.adapt.restart import FALLBACK_MODES
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.adapt.run_state import Phase, RunState
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.run.blocks import Installation
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, from_profile_shapes
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks

log = logging.getLogger(__name__)


class WarmUpPhase(Phase):
    """Training before the first policy: every block under torch's checkpoint, until a batch can be profiled."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._profiler = RunProfiler(run.config, run.loop)
        self._profiler.inner_steps.expected = run.optimizer
        self._builder = PolicyBuilder(run.config, run.source, self._profiler)
        self._batches = MicroBatches()
        self._checkpointing = FullRecompute(run.model, run.config)
        self._batches.keep_last(run.model)
        self._step = 0
        """Finished steps when the current one began."""
        self._has_tried = False
        """True once a policy before the first forward was tried."""
        self._profile_error: torch.OutOfMemoryError | None = None
        """Error of a profile before the first forward."""

    def begin_step(self, step: int) -> None:
        self._step = step

    def begin_micro_batch(self, inputs: Any) -> None:
        self._batches.begin()
        self._checkpointing.begin_step()
        self._profiler.inner_steps.open()
        self._meet(inputs)

    def _meet(self, inputs: Any) -> None:
        if self._batches.read_shapes(inputs):
            self._checkpointing.sizes.add(self._batches.shapes)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which may set the first policy, and call it again if memory runs out under that policy."""
        if not self._run.config.retry_out_of_memory:
            return run()
        try:
            return run_with_retry(run, self._run.model, self._tighten, self._advice)
        except torch.OutOfMemoryError:
            if self._profile_error is not None:
                raise self._profile_error from None
            raise

    def _tighten(self) -> str | None:
        phase = self._run.phase
        return phase.tighten() if isinstance(phase, AdaptivePhase) else "no policy that can change was active"

    def _advice(self) -> str:
        phase = self._run.phase
        if isinstance(phase, AdaptivePhase):
            return phase.controller.advice()
        return "Use a smaller batch or shorter sequences"

    def end_micro_batch(self) -> None:
        self._profiler.inner_steps.close()
        self._run.stats.add_early(self._batches.known_shapes)

    def begin_forward(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        self._meet(inputs)
        if self._run.num_steps == 0 and not self._has_tried:
            self._has_tried = True
            self._set_policy_before_forward(inputs, compute_loss)
        self._batches.note_loss_call(inputs, compute_loss, is_certain)

    def _set_policy_before_forward(self, inputs: Any, compute_loss: ComputeLoss | None) -> None:
        """Profile the first batch before its forward and follow the policy, if the batch allows that."""
        run, model = self._run, self._run.model
        if not isinstance(inputs, Mapping):
            self._profiler.note_unpredicted(f"inputs of type {type(inputs).__name__} are not profiled, only mappings")
            return
        if self._profiler.must_wait(model):
            self._profiler.note_unpredicted("a profiler of torch's is active")
            return
        self._checkpointing.remove()
        try:
            first = self._builder.before_first_step(model, run.optimizer, dict(inputs), compute_loss)
        except torch.OutOfMemoryError as error:
            self._profile_error = error
            raise
        if first is None:
            self._checkpointing = FullRecompute(model, run.config)
            self._checkpointing.begin_step()
            self._checkpointing.sizes.add(self._batches.shapes)
            return
        self._batches.drop()
        if run.source is not None:
            self._profiler.remove()  # a user's policy never changes
        profile, policy = first
        run.phase = following = follow(run, policy, profile, self._step, self._profiler, self._batches)
        following.begin_in_step(profile, policy, self._step)
        run.note(PolicySet(step=self._step, **predictions(policy)))
        run.save(changed=True)

    def note_loss(self, result: Any, inputs: Any) -> None:
        self._batches.note_loss(result)

    def begin_optimizer_step(self) -> None:
        self._run.watch_optimizer(self._profiler.optimizer)

    def end_optimizer_step(self) -> None:
        self._profiler.optimizer.end()

    def end_step(self, step: int) -> None:
        run = self._run
        if run.num_steps == 1:
            check_called(self._checkpointing)
        num_more = run.num_steps - run.config.profile_steps
        if num_more >= 0 and not self._profiler.must_wait(run.model) and is_ready(self._checkpointing, num_more):
            self._set_policy_after_step(step)

    def _set_policy_after_step(self, step: int) -> None:
        """Profile the most recent batch, solve, and follow the policy from the next step on."""
        run, batches = self._run, self._batches
        self._profiler.all_sizes = any(gather_from_all_ranks(len(self._checkpointing.sizes) > 1))
        self._checkpointing.remove()  # the profiler's wrappers around the blocks must not enclose these
        profile, policy, is_provisional = self._builder.after_steps(run.model, run.optimizer, *batches.take())
        run.phase = following = follow(run, policy, profile, step, self._profiler, batches)
        following.begin_after_step(profile, policy, is_provisional)
        run.note(PolicySet(step=step, fallback_steps=run.num_steps, **predictions(policy)))
        run.save(changed=True)

    def abandon_step(self) -> None:
        self._profiler.remove()

    def remove(self) -> None:
        self._checkpointing.remove()
        self._profiler.remove()
        self._batches.drop()


class FixedPolicyPhase(Phase):
    """Training under a policy that never changes."""

    controller: Controller | None = None

    def __init__(self, run: RunState, handle: PolicyHandle) -> None:
        self._run = run
        self.handle = handle

    def begin_after_step(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        """Begin at a step's end, after a profile. A provisional policy is used until a step's memory is measured."""
        self._run.stats.estimate_early_overheads(profile, None)

    def begin_in_step(self, profile: Profile, policy: Policy, step: int) -> None:
        """Begin within the first micro-batch of a step, after `step` finished steps."""
        self.begin_after_step(profile, policy, is_provisional=False)
        self.begin_micro_batch(None)

    def resume(self, saved: Saved) -> None:
        """Restore the state of `saved`."""

    def begin_micro_batch(self, inputs: Any) -> None:
        self.handle.installation.begin_step()
        self.handle.tape_cache.fallbacks.clear()

    def end_micro_batch(self) -> None:
        self._run.stats.add(self._run.active_policy.predicted_overhead_ms, self.handle.tape_cache.fallbacks)

    def end_step(self, step: int) -> None:
        self._run.count_step(step)
        if self._run.num_steps == 1:
            check_called(self.handle.installation)

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        run = self._run
        figures = metrics(run.active_policy, run.profile, self.controller, run.stats.overhead_ms)
        figures |= run.fallback_figures()
        if is_on_all_ranks:
            run.stats.logged()
        return figures

    def save(self, folder: Path) -> None:
        save_in_checkpoint(folder, self._saved())

    def _saved(self) -> Saved:
        run = self._run
        size_policies = [SavedSizePolicy(policy=run.active_policy, profile=run.profile)]
        budget = run.config.memory_budget
        return Saved(size_policies=size_policies, memory_budget=budget, history=run.history, step=run.step)

    def ends(self) -> None:
        self._run.save_rest()

    def remove(self) -> None:
        self.handle.remove()


class AdaptivePhase(FixedPolicyPhase):
    """Training under policies that follow the data and the sizes of batches (adapt/controller.py)."""

    controller: Controller

    def __init__(
        self, run: RunState, handle: PolicyHandle, policy_step: int, profiler: RunProfiler, batches: MicroBatches
    ) -> None:
        super().__init__(run, handle)
        num_uncounted = run.loop.num_before_step(next(run.model.parameters()).device)
        self.controller = Controller(handle, run.config, policy_step, run.note, run.loop.num_micro, num_uncounted)
        self._profiler = profiler
        self._builder = PolicyBuilder(run.config, run.source, profiler)
        self._batches = batches
        self._step = 0
        """Finished steps when the current one began."""

    def begin_after_step(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        shapes = self._shapes_of(profile)
        self.controller.choice.add(shapes, profile, policy, is_provisional, self._profiler.all_sizes)
        self._run.stats.estimate_early_overheads(profile, shapes)

    def begin_in_step(self, profile: Profile, policy: Policy, step: int) -> None:
        """Begin within a step's first micro-batch. If the budget bounds the peak, the policy is provisional."""
        bounds_peak = Budget.resolve(self._run.config.memory_budget, profile, self._run.config).limits_peak
        shapes = self._shapes_of(profile)
        self.controller.choice.add(shapes, profile, policy, is_provisional=bounds_peak, expects_size_model=True)
        self._run.stats.estimate_early_overheads(profile, shapes)
        self.begin_step(step)
        super().begin_micro_batch(None)
        self.controller.choice.choose(self._batches.shapes, self._batches.nbytes)

    def resume(self, saved: Saved) -> None:
        self.controller.resume(saved)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self.controller.requests.wants_batch:
            self._batches.keep_last(self._run.model)
        self.controller.begin_step(step + 1, self._run.model, self._run.optimizer)

    def begin_micro_batch(self, inputs: Any) -> None:
        self._batches.begin()
        super().begin_micro_batch(inputs)
        self._choose(inputs)

    def _choose(self, inputs: Any) -> None:
        """Apply the policy for the micro-batch as soon as the shapes of its tensors are known."""
        if self._batches.read_shapes(inputs):
            self.controller.choice.choose(self._batches.shapes, self._batches.nbytes)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, and call it again under a tighter policy if memory runs out."""
        if not self._run.config.retry_out_of_memory:
            return run()
        return run_with_retry(run, self.handle.installation.model, self.tighten, self.controller.advice)

    def end_micro_batch(self) -> None:
        self._profiler.inner_steps.close()  # open if the policy was set within this micro-batch
        self._run.stats.add(*self.controller.choice.end_micro_batch(self.handle.tape_cache.fallbacks))

    def tighten(self) -> str | None:
        """Follow a policy with less memory after the step ran out of memory.

        If that is impossible, return the reason.
        """
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        obstacle = self.controller.tighten(self._step + 1)
        if obstacle is None:
            self._show()
            self._batches.begin_again()
        return obstacle

    def begin_forward(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        self._choose(inputs)
        self._batches.note_loss_call(inputs, compute_loss, is_certain)

    def note_loss(self, result: Any, inputs: Any) -> None:
        self._batches.note_loss(result)

    def abandon_step(self) -> None:
        self.controller.cancel()
        self._profiler.remove()

    def end_backward(self) -> None:
        self.controller.end_backward()

    def begin_optimizer_step(self) -> None:
        self.controller.end_backward()
        self._run.watch_optimizer(self._profiler.optimizer)  # not yet measured in a resumed run

    def end_optimizer_step(self) -> None:
        if self._profiler.optimizer.meter is not None:
            self._profiler.optimizer.end()

    def end_step(self, step: int) -> None:
        super().end_step(step)
        controller, history = self.controller, self._run.history
        started, num_events = time.perf_counter(), len(history)
        has_changed = controller.end_step(step)
        if self._batches.is_keeping:
            has_changed |= self._profile_again(step)
        if has_changed:
            self._show()
        if len(history) > num_events:
            self._run.save(has_changed)
        if controller.is_busy or len(history) > num_events:
            controller.context.extra_ms += (time.perf_counter() - started) * 1e3

    def _profile_again(self, step: int) -> bool:
        """Profile the step's batch if the controller requests that. Return True if a policy was set."""
        if self._profiler.must_wait(self._run.model):
            return False
        sizes = self.controller.requests.take_sizes()
        if sizes is not None:
            return self._add_size(sizes, step)
        return self.controller.requests.restart.num_tries > 0 and self._restart(step)

    def _add_size(self, sizes: BatchShapes, step: int) -> bool:
        """Profile the step's batch, resized to `sizes`, and add a policy. Return True if that was possible."""
        self._profiler.all_sizes = True
        cache = self.controller.choice.cache
        try:
            with self.handle.suspend():
                result = self._builder.for_size(
                    sizes, self._run.model, self._run.optimizer, self.controller, *self._batches.take()
                )
        except RefusedSizeError as reason:
            log.warning("Adacc: batches of %s get no policy of their own: %s", describe(sizes), reason)
            cache.refuse(sizes)
            self._run.note(MemoryNoted(step=step, reason=f"{describe(sizes)}: {reason}"))
            return False
        if result is None:
            return False
        shapes, profile, policy = result
        self.controller.choice.add(shapes, profile, policy, expects_size_model=True)
        if shapes != sizes:  # else each batch of the bucket would request a policy that fits it better
            cache.refuse(sizes)
        self._run.note(PolicySet(step=step, reason=f"for batches of {describe(shapes)}", **predictions(policy)))
        log.info("Adacc: for batches of %s: %s", describe(shapes), policy.summary())
        return True

    def _restart(self, step: int) -> bool:
        """Profile the step's batch and drop all policies but the new one. Return False if the batch is not suitable."""
        restart = self.controller.requests.restart
        why = restart.why
        if not self.controller.requests.can_restart():
            if restart.num_tries == 0:
                self._report_failed_restart(step, why, "no batch came that calls all of them")
            return False
        restart.num_tries = 0
        try:
            with self.handle.suspend():
                profile, policy = self._builder.for_all_blocks(
                    self._run.model, self._run.optimizer, self.controller, *self._batches.take()
                )
        except RefusedSizeError as reason:
            self._report_failed_restart(step, why, str(reason))
            return False
        self.controller.restart(self._shapes_of(profile), profile, policy)
        self._run.note(PolicySet(step=step, reason=why, **predictions(policy)))
        log.info("Adacc: %s: %s", why, policy.summary())
        return True

    def _report_failed_restart(self, step: int, why: str, obstacle: str) -> None:
        """Warn that the run does not start over, although there is a reason `why`, because of the `obstacle`.

        The run keeps its policies. Calls without a plan run as in `FALLBACK_MODES`.
        """
        reason = f"{why}, which stay {FALLBACK_MODES[why]}: {obstacle}"
        log.warning("Adacc: %s", reason)
        self._batches.drop()
        self._run.note(MemoryNoted(step=step, reason=reason))

    def _shapes_of(self, profile: Profile) -> BatchShapes | None:
        """Return the sizes of the profiled batch. All ranks use the first rank's, as they use its profile."""
        if profile.sizes is not None:
            return from_profile_shapes(profile.measured[0][0])
        return broadcast_from_first_rank(lambda: self._batches.known_shapes)

    def _show(self) -> None:
        """Set the run's policy and profile to the active ones."""
        replanner = self.controller.shown.replanner
        self._run.show(replanner.policy, replanner.priced)

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        if is_on_all_ranks:
            self.controller.read_logs(logs)
        return super().figures(logs, is_on_all_ranks)

    def _saved(self) -> Saved:
        return replace(self.controller.saved(self._run.history), step=self._run.step)

    def remove(self) -> None:
        self.controller.cancel()
        super().remove()
        self._profiler.remove()
        self._batches.drop()


def follow(
    run: RunState,
    policy: Policy,
    profile: Profile | None,
    policy_step: int,
    profiler: RunProfiler,
    batches: MicroBatches,
) -> FixedPolicyPhase:
    """Apply `policy` to the model, and return the phase of training under it.

    The policy never changes if the user supplied it, or if its profile is missing.
    """
    handle = PolicyHandle(run.model, policy, run.config.block_classes, profile)
    run.show(policy, profile)
    log.info("Adacc: %s", policy.summary())
    if run.source is None and profile is not None:
        return AdaptivePhase(run, handle, policy_step, profiler, batches)
    return FixedPolicyPhase(run, handle)


def resume(run: RunState, saved: Saved, step: int) -> None:
    """Begin after `step` finished steps with the policies of `saved`: a user's, or a checkpoint's."""
    first = saved.size_policies[0]
    run.history = list(saved.history)
    profiler, batches = RunProfiler(run.config, run.loop), MicroBatches()
    profiler.inner_steps.expected = run.optimizer
    policy_step = step if saved.policy_step is None else saved.policy_step
    run.phase = following = follow(run, first.policy, first.profile, policy_step, profiler, batches)
    following.resume(saved)
    run.note(PolicySet(step=step, **predictions(first.policy)))


def check_called(installation: Installation) -> None:
    """Raise RuntimeError if no block's wrapper was called: another package has replaced the class's forward."""
    uncalled = installation.uncalled()
    if len(uncalled) == len(installation.blocks):
        raise RuntimeError(
            f"{len(uncalled)} of {len(installation.blocks)} blocks, {uncalled[0]} first, never reached Adacc in "
            f"the first step: their class's forward was replaced (a fast-kernel patch?); name their class with "
            f"AdaccConfig(block_classes=...) so that their forward is wrapped instead"
        )
