"""The phases of a run under a session, each with what it does at the events of a training loop.

Full recomputation until a batch is profiled; then a policy is followed as it is, or kept in step with the data. Before
and after a run there is a phase that does nothing, and a compiled run has one of its own (callbacks/compiled_phase.py).
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
from adacc_hf.adapt.fallback_stats import LEFT_AS, STEPS
from adacc_hf.adapt.full_recompute import FullRecompute, is_ready
from adacc_hf.adapt.micro_batches import MicroBatches
from adacc_hf.adapt.policy_builder import PolicyBuilder, RefusedSizeError
from adacc_hf.adapt.policy_cache import metrics, predictions
from adacc_hf.adapt.run_state import Phase, RunState
from adacc_hf.adapt.step_timer import run_with_retry
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
    """Every block under torch's own checkpoint, until the last batch can be profiled."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._maker = PolicyBuilder(run.config, run.given, run.loop)
        self._maker.inner_steps.expected = run.optimizer
        self._batches = MicroBatches()
        self._waiting = FullRecompute(run.model, run.config)
        self._batches.catch(run.model)
        self._step = 0
        """Steps that were over when the present one began."""
        self._has_tried = False
        """Whether it was tried to have a policy for the first step already."""
        self._failure: torch.OutOfMemoryError | None = None
        """The error of a profile before the first step."""

    def step_begins(self, step: int) -> None:
        self._step = step

    def micro_batch_begins(self, inputs: Any) -> None:
        self._batches.begin()
        self._waiting.begin_step()
        self._maker.inner_steps.open()
        self._meet(inputs)

    def _meet(self, inputs: Any) -> None:
        if self._batches.meet(inputs):
            self._waiting.sizes.add(self._batches.shapes)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, within which the first policy may be made, and once more if memory runs out under that policy."""
        if not self._run.config.retry_out_of_memory:
            return run()
        try:
            return run_with_retry(run, self._run.model, self._tighten, self._advice)
        except torch.OutOfMemoryError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def _tighten(self) -> str | None:
        phase = self._run.phase
        return phase.tighten() if isinstance(phase, AdaptivePhase) else "no policy that could change was in force"

    def _advice(self) -> str:
        phase = self._run.phase
        return (
            phase.controller.advice() if isinstance(phase, AdaptivePhase) else "Use a smaller batch or shorter sequences"
        )

    def micro_batch_ends(self) -> None:
        self._maker.inner_steps.close()
        self._run.ran.ran_early(self._batches.met)

    def forward_begins(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        self._meet(inputs)
        if self._run.num_steps == 0 and not self._has_tried:
            self._has_tried = True
            self._begin_within(inputs, compute_loss)
        self._batches.given(inputs, compute_loss, is_certain)

    def _begin_within(self, inputs: Any, compute_loss: ComputeLoss | None) -> None:
        """Train within the budget from the first step on, if the first steps and the profile might take more."""
        run, model = self._run, self._run.model
        if not isinstance(inputs, Mapping) or self._maker.must_wait(model):
            return
        self._waiting.remove()
        try:
            found = self._maker.before_first_step(model, run.optimizer, dict(inputs), compute_loss)
        except torch.OutOfMemoryError as error:
            self._failure = error
            raise
        if found is None:
            self._waiting = FullRecompute(model, run.config)
            self._waiting.begin_step()
            self._waiting.sizes.add(self._batches.shapes)
            return
        self._batches.drop()
        if run.given is not None:
            self._maker.remove()  # nobody asks it again
        profile, policy = found
        run.phase = following = follow(run, policy, profile, self._step, self._maker, self._batches)
        following.begin_within(profile, policy, self._step)
        run.note(self._step, "policy", **predictions(policy))
        run.save(changed=True)

    def loss_is_made(self, result: Any, inputs: Any) -> None:
        self._batches.loss_is_made(result)

    def optimizer_begins(self) -> None:
        self._run.watch_optimizer(self._maker.optimizer)

    def optimizer_ends(self) -> None:
        self._maker.optimizer.end()

    def step_ends(self, step: int) -> None:
        run = self._run
        if run.num_steps == 1:
            check_called(self._waiting)
        num_more = run.num_steps - run.config.profile_steps
        if num_more >= 0 and not self._maker.must_wait(run.model) and is_ready(self._waiting, num_more):
            self._set_policy(step)

    def _set_policy(self, step: int) -> None:
        """Profile the last batch, solve, and follow the policy from the next step on."""
        run, maker, batches = self._run, self._maker, self._batches
        maker.all_sizes = any(gather_from_all_ranks(len(self._waiting.sizes) > 1))
        self._waiting.remove()  # the profiler's own functions around the blocks must not stand around these
        profile, policy, is_provisional = maker.first(run.model, run.optimizer, *batches.take())
        run.phase = following = follow(run, policy, profile, step, maker, batches)
        following.begin_with(profile, policy, is_provisional)
        run.note(step, "policy", **predictions(policy), **{STEPS: run.num_steps})
        run.save(changed=True)

    def broken_off(self) -> None:
        self._maker.remove()

    def remove(self) -> None:
        self._waiting.remove()
        self._maker.remove()
        self._batches.drop()


class FixedPolicyPhase(Phase):
    """A policy that stays as it is."""

    controller: Controller | None = None

    def __init__(self, run: RunState, handle: PolicyHandle) -> None:
        self._run = run
        self.handle = handle

    def begin_with(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        """Go on after a profile; a policy may be followed only until a step was counted."""
        self._run.ran.policy_is_set(profile, None)

    def begin_within(self, profile: Profile, policy: Policy, step: int) -> None:
        """Go on within the first micro-batch of a step."""
        self.begin_with(profile, policy, is_provisional=False)
        self.micro_batch_begins(None)

    def restore(self, saved: Saved) -> None:
        """Go on where the run stood that wrote `saved`."""

    def micro_batch_begins(self, inputs: Any) -> None:
        self.handle.installation.begin_step()
        self.handle.tape_cache.fallbacks.clear()

    def micro_batch_ends(self) -> None:
        self._run.ran.ran(self._run.in_force.predicted_overhead_ms, self.handle.tape_cache.fallbacks)

    def step_ends(self, step: int) -> None:
        self._run.count_step(step)
        if self._run.num_steps == 1:
            check_called(self.handle.installation)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        run = self._run
        found = metrics(run.in_force, run.profile, self.controller, run.ran.overhead_ms) | run.fallback_figures()
        if is_own:
            run.ran.logged()
        return found

    def save(self, folder: Path) -> None:
        save_in_checkpoint(folder, self._saved())

    def _saved(self) -> Saved:
        run = self._run
        shape_policies = [SavedSizePolicy(policy=run.in_force, profile=run.profile)]
        budget = run.config.memory_budget
        return Saved(shape_policies=shape_policies, memory_budget=budget, history=run.history, step=run.step)

    def ends(self) -> None:
        self._run.save_rest()

    def remove(self) -> None:
        self.handle.remove()


class AdaptivePhase(FixedPolicyPhase):
    """A policy that follows the data (adapt/controller.py), and others for other sizes of batch."""

    controller: Controller

    def __init__(
        self, run: RunState, handle: PolicyHandle, policy_step: int, maker: PolicyBuilder, batches: MicroBatches
    ) -> None:
        super().__init__(run, handle)
        uncounted = run.loop.num_before_step(next(run.model.parameters()).device)
        self.controller = Controller(handle, run.config, policy_step, run.note, run.loop.num_micro, uncounted)
        self._maker = maker
        self._batches = batches
        self._step = 0
        """Steps that were over when the present one began."""

    def begin_with(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        shapes = self._shapes_of(profile)
        self.controller.add(shapes, profile, policy, is_provisional, self._maker.all_sizes)
        self._run.ran.policy_is_set(profile, shapes)

    def begin_within(self, profile: Profile, policy: Policy, step: int) -> None:
        """Go on within the first micro-batch of a step; under a budget of the peak until a step was counted."""
        bounds_peak = Budget.resolve(self._run.config.memory_budget, profile, self._run.config).of_peak
        shapes = self._shapes_of(profile)
        self.controller.add(shapes, profile, policy, is_provisional=bounds_peak, was_measured=True)
        self._run.ran.policy_is_set(profile, shapes)
        self.step_begins(step)
        super().micro_batch_begins(None)
        self.controller.choose(self._batches.shapes, self._batches.nbytes)

    def restore(self, saved: Saved) -> None:
        self.controller.restore(saved)

    def step_begins(self, step: int) -> None:
        self._step = step
        if self.controller.wanted is not None or self.controller.fresh_start.num_tries > 0:
            self._batches.catch(self._run.model)
        self.controller.step_begins(step + 1, self._run.model, self._run.optimizer)

    def micro_batch_begins(self, inputs: Any) -> None:
        self._batches.begin()
        super().micro_batch_begins(inputs)
        self._meet(inputs)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, tried twice if memory runs out."""
        if not self._run.config.retry_out_of_memory:
            return run()
        return run_with_retry(run, self.handle.installation.model, self.tighten, self.controller.advice)

    def micro_batch_ends(self) -> None:
        self._maker.inner_steps.close()  # of a run that came by its policy within this micro-batch
        self._run.ran.ran(*self.controller.has_run(self.handle.tape_cache.fallbacks))

    def _meet(self, inputs: Any) -> None:
        """Put the policy for a micro-batch in force, as soon as it is tensors."""
        if self._batches.meet(inputs):
            self.controller.choose(self._batches.shapes, self._batches.nbytes)

    def tighten(self) -> str | None:
        """Plan with less memory after a step ran out of it; return why that cannot be, or None."""
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        obstacle = self.controller.tighten(self._step + 1)
        if obstacle is None:
            self._show()
            self._batches.begin_again()
        return obstacle

    def forward_begins(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        self._meet(inputs)
        self._batches.given(inputs, compute_loss, is_certain)

    def loss_is_made(self, result: Any, inputs: Any) -> None:
        self._batches.loss_is_made(result)

    def broken_off(self) -> None:
        self.controller.cancel()
        self._maker.remove()

    def backward_is_over(self) -> None:
        self.controller.backward_is_over()

    def optimizer_begins(self) -> None:
        self.controller.backward_is_over()
        self._run.watch_optimizer(self._maker.optimizer)  # a run that resumes has not seen it yet

    def optimizer_ends(self) -> None:
        if self._maker.optimizer.meter is not None:
            self._maker.optimizer.end()

    def step_ends(self, step: int) -> None:
        super().step_ends(step)
        controller, history = self.controller, self._run.history
        started, num_events = time.perf_counter(), len(history)
        changed = controller.step_ends(step)
        if self._batches.is_catching:
            changed |= self._profile_again(step)
        if changed:
            self._show()
        if len(history) > num_events:
            self._run.save(changed)
        if controller.is_busy or len(history) > num_events:
            controller.tracking_ms += (time.perf_counter() - started) * 1e3

    def _profile_again(self, step: int) -> bool:
        """Make a policy with the step's batch where one is wanted; returns whether there is one."""
        if self._maker.must_wait(self._run.model):
            return False
        wanted, self.controller.wanted = self.controller.wanted, None
        if wanted is not None:
            return self._add_size(wanted, step)
        return self.controller.fresh_start.num_tries > 0 and self._start_over(step)

    def _add_size(self, wanted: BatchShapes, step: int) -> bool:
        """Profile and solve for a size of batch that was seen often, with the step's batch made to that size."""
        self._maker.all_sizes = True
        shape_policies = self.controller.shape_policies
        try:
            with self.handle.suspended():
                made = self._maker.for_size(
                    wanted, self._run.model, self._run.optimizer, self.controller, *self._batches.take()
                )
        except RefusedSizeError as reason:
            log.warning("Adacc: batches of %s get no policy of their own: %s", describe(wanted), reason)
            shape_policies.refuse(wanted)
            self._run.note(step, "memory", reason=f"{describe(wanted)}: {reason}")
            return False
        if made is None:
            return False
        shapes, profile, policy = made
        self.controller.add(shapes, profile, policy, was_measured=True)
        if shapes != wanted:  # and so on: each batch of the bucket would want a policy that fits it better
            shape_policies.refuse(wanted)
        self._run.note(step, "policy", **predictions(policy), reason=f"for batches of {describe(shapes)}")
        log.info("Adacc: for batches of %s: %s", describe(shapes), policy.summary())
        return True

    def _start_over(self, step: int) -> bool:
        """Profile the step's batch and start over with its policy, if it is one to do so with."""
        why = self.controller.fresh_start.why
        if not self.controller.can_start_over():
            if self.controller.fresh_start.num_tries == 0:
                self._stay(step, why, "no batch came that calls all of them")
            return False
        self.controller.fresh_start.num_tries = 0
        try:
            with self.handle.suspended():
                made = self._maker.for_all_blocks(
                    self._run.model, self._run.optimizer, self.controller, *self._batches.take()
                )
        except RefusedSizeError as reason:
            self._stay(step, why, str(reason))
            return False
        profile, policy = made
        self.controller.start_over(self._shapes_of(profile), profile, policy)
        self._run.note(step, "policy", **predictions(policy), reason=why)
        log.info("Adacc: %s: %s", why, policy.summary())
        return True

    def _shapes_of(self, profile: Profile) -> BatchShapes | None:
        """The sizes of the batch that was just profiled: the first rank's, whose profile all ranks share."""
        if profile.sizes is not None:
            return from_profile_shapes(profile.measured[0][0])
        return broadcast_from_first_rank(lambda: self._batches.met)

    def _stay(self, step: int, why: str, obstacle: str) -> None:
        """Say that a run goes on as it is, although `why`."""
        reason = f"{why}, which stay {LEFT_AS[why]}: {obstacle}"
        log.warning("Adacc: %s", reason)
        self._batches.drop()
        self._run.note(step, "memory", reason=reason)

    def _show(self) -> None:
        """Let the run's policy and profile be those in force."""
        replanner = self.controller.shown.replanner
        self._run.show(replanner.policy, replanner.priced)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        if is_own:
            self.controller.logged(logs)
        return super().figures(logs, is_own)

    def _saved(self) -> Saved:
        return replace(self.controller.saved(self._run.history), step=self._run.step)

    def remove(self) -> None:
        self.controller.cancel()
        super().remove()
        self._maker.remove()
        self._batches.drop()


def follow(
    run: RunState,
    policy: Policy,
    profile: Profile | None,
    policy_step: int,
    maker: PolicyBuilder,
    batches: MicroBatches,
) -> FixedPolicyPhase:
    """The phase that has `policy` in force; one that was given, or is known without its profile, stays as it is."""
    handle = PolicyHandle(run.model, policy, run.config.block_classes, profile)
    run.show(policy, profile)
    log.info("Adacc: %s", policy.summary())
    if run.given is None and profile is not None:
        return AdaptivePhase(run, handle, policy_step, maker, batches)
    return FixedPolicyPhase(run, handle)


def resume(run: RunState, saved: Saved, step: int) -> None:
    """Go on at `step` with what was given, or with what a checkpoint holds."""
    first = saved.shape_policies[0]
    run.history = list(saved.history)
    maker, batches = PolicyBuilder(run.config, run.given, run.loop), MicroBatches()
    maker.inner_steps.expected = run.optimizer
    policy_step = step if saved.policy_step is None else saved.policy_step
    run.phase = following = follow(run, first.policy, first.profile, policy_step, maker, batches)
    following.restore(saved)
    run.note(step, "policy", **predictions(first.policy))


def check_called(installation: Installation) -> None:
    """Raise RuntimeError if no block's function was called: something replaced their forward at class level."""
    uncalled = installation.uncalled()
    if len(uncalled) == len(installation.blocks):
        raise RuntimeError(
            f"{len(uncalled)} of {len(installation.blocks)} blocks, {uncalled[0]} first, never reached Adacc in "
            f"the first step: their class's forward was replaced (a fast-kernel patch?); name their class with "
            f"AdaccConfig(block_classes=...) so that their forward is wrapped instead"
        )
