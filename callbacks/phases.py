"""The phases of a run under AdaccCallback, each with what it does at the Trainer's events.

Full recomputation until a batch is profiled; then a policy is followed as it is, or kept in step with the data. A
compiled run has a phase of its own; before and after a run there is one that does nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments

from adacc_hf.adapt.checkpoint_files import (
    Saved,
    SavedShapePolicy,
    checkpoint_folder,
    going_on,
    output_folder,
    save_files,
    save_history,
    save_in_checkpoint,
)
from adacc_hf.adapt.evolution import Evolution
from adacc_hf.adapt.left_plans import LEFT_AS
from adacc_hf.adapt.shape_policies import metrics, predictions
from adacc_hf.adapt.steps import run_with_retry
from adacc_hf.adapt.what_ran import STEPS, UNCOMPILED, WhatRan, num_fallback_steps
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.callbacks.policy_maker import FullRecompute, PolicyMaker, PolicySource, RefusedSizeError, is_ready
from adacc_hf.callbacks.trainer import LastBatch, OptimizerWatch, loss_of
from adacc_hf.price.whole_model import ComputeLoss
from adacc_hf.run.blocks import Installation
from adacc_hf.run.executor import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes, describe, from_plain
from adacc_hf.torch_glue.ranks import from_first_rank, of_all_ranks

log = logging.getLogger(__name__)

REPORTS_LACK = "training goes on, and reports show what is there"
COMPILED_RUN = "adacc_hf.compiler.compiled_run"
"""What runs with `torch_compile=True` go by. It stands above the callbacks, and Inductor is slow to import: it is found
by its name when such a run begins."""
HISTORY_PARTS = 64
"""The part of a run's history that may be unwritten for a while: one event in 64."""


class Phase:
    """What a run does at the Trainer's events, as wrapped methods of the Trainer's see them too. This one does nothing.

    `step` is the number of steps that are over.
    """

    def step_begins(self, step: int, model: Any, optimizer: Any) -> None:
        """A step begins."""

    def micro_batch(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step on one micro-batch."""
        return step(model, inputs, *args, **kwargs)

    def micro_batch_ends(self) -> None:
        """That step is over: note what it ran under."""

    def loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss, for training and evaluation."""
        return compute(model, inputs, *args, **kwargs)

    def optimizer_begins(self, args: TrainingArguments, model: Any) -> None:
        """The optimizer is about to step."""

    def optimizer_ends(self) -> None:
        """The optimizer has stepped."""

    def step_ends(self, step: int, model: Any, optimizer: Any) -> None:
        """A step is over."""

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        """What is added to `logs` of training; `is_own` says whether the Trainer makes them, on all ranks."""
        return {}

    def save(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write what a run that resumes needs into the checkpoint of the present step."""

    def ends(self) -> None:
        """The run is over: write what is left to write."""

    def remove(self) -> None:
        """Take everything off the model and the Trainer. Harmless when called again."""


class Run:
    """One run of a Trainer: what all its phases share, what it has come to, and the files that tell of it."""

    def __init__(self, config: AdaccConfig, given: PolicySource | None) -> None:
        self.config, self.given = config, given
        self.phase = Phase()
        self.policy: Policy | None = None
        self.profile: Profile | None = None
        self.compiled_policy: Any = None
        self.history: list[dict[str, Any]] = []
        self.ran = WhatRan()
        self.num_micro = 1
        self.num_steps = 0
        self._folder, self._is_first_rank = "", False
        self._num_saved = 0
        """Events of the history that are written."""
        self._is_unsaved = False
        """Whether the policy in force is not."""
        self._is_uncounted = False
        """Whether steps were counted in the history since it was written."""

    def begin(self, args: TrainingArguments, state: TrainerState) -> None:
        """Forget what an earlier run has come to, but for its compiled policy."""
        self.policy, self.profile, self.history = None, None, []
        self.ran = WhatRan()
        self.num_micro = args.gradient_accumulation_steps
        self.num_steps = self._num_saved = 0
        self._folder, self._is_first_rank = output_folder(args), state.is_world_process_zero
        self._is_unsaved = self._is_uncounted = False

    @property
    def in_force(self) -> Policy:
        """The policy, in a phase that follows one."""
        assert self.policy is not None
        return self.policy

    def note(self, step: int, event: str, **figures: Any) -> None:
        self.history.append({"step": step, "event": event, **figures})

    def show(self, policy: Policy, profile: Profile | None) -> None:
        """These are in force from now on."""
        self.policy, self.profile = policy, profile

    def watch_optimizer(self, watch: OptimizerWatch, args: TrainingArguments, model: nn.Module) -> None:
        """Look at what clipping and the optimizer take at this step's end, if it is late enough and none was seen."""
        if not watch.has_seen and self.num_steps >= self.config.profile_steps - 1:
            watch.begin(args, model)

    def count_step(self, step: int) -> None:
        """Count `step`, which is over, if it ran otherwise than the policy says."""
        self._is_uncounted |= self.ran.step_ends(step, self.history)

    def fallback_figures(self) -> dict[str, float]:
        """How many steps ran otherwise than the policy says, for the Trainer's log."""
        return {f"adacc/{STEPS}": num_fallback_steps(self.history)}

    def save(self, changed: bool, is_last: bool = False) -> None:
        """Write the policy if it changed, and what happened, into the run's folder.

        Of a long history only every so many events: all of it is written each time.
        """
        if not self._is_first_rank:
            return
        self._is_unsaved |= changed
        with going_on(self._folder, REPORTS_LACK):
            if self._is_unsaved:
                save_files(self._folder, self.in_force, self.profile)
                self._is_unsaved = False
            if changed or is_last or (len(self.history) - self._num_saved) * HISTORY_PARTS >= len(self.history):
                save_history(self._folder, self.history)
                self._num_saved, self._is_uncounted = len(self.history), False

    def save_rest(self) -> None:
        """Write what `save` has left out so far."""
        if self._num_saved < len(self.history) or self._is_uncounted:
            self.save(self._is_unsaved, is_last=True)

    def save_by(self, write: Callable[[str | Path, list[dict[str, Any]]], None]) -> None:
        """Have `write` put what happened into the run's folder, with the policy of a kind of its own."""
        if self._is_first_rank:
            with going_on(self._folder, REPORTS_LACK):
                write(self._folder, self.history)


class MicroBatches:
    """What a run trains on: the sizes of each micro-batch, and, while a profile waits for it, the last one itself."""

    def __init__(self, trainer: Trainer | None) -> None:
        self.shapes: BatchShapes = ()
        self.has_met = False
        """Whether `shapes` are those of the micro-batch that runs, or ran last."""
        self._trainer = trainer
        self._sizes: list[tuple[str, torch.Size]] = []
        self._last: LastBatch | None = None

    @property
    def is_catching(self) -> bool:
        """Whether the last one is kept."""
        return self._last is not None

    @property
    def met(self) -> BatchShapes | None:
        """The sizes of the one that runs, or ran last; None where it has no tensors yet."""
        return self.shapes if self.has_met else None

    def begin(self) -> None:
        """The next one begins."""
        self.has_met = False

    def meet(self, inputs: Any) -> bool:
        """Whether `inputs` have the micro-batch's tensors, which were not met before: reinforcement learning makes them
        of samples within the step."""
        if self.has_met or not isinstance(inputs, Mapping):
            return False
        sizes = [(name, given.shape) for name, given in inputs.items() if isinstance(given, torch.Tensor)]
        if sizes != self._sizes:  # most have the sizes of the one before
            self._sizes, self.shapes = sizes, batch_shapes(inputs)
        self.has_met = True
        return True

    def catch(self, model: nn.Module) -> None:
        """Keep the last one from now on. Harmless when it is kept already."""
        if self._last is None:
            self._last = LastBatch(model)

    def loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """What `compute` returns, the Trainer's `compute_loss`; a profile may need it with what it is given."""
        last = self._last  # which a `drop` within the loss would take away
        if last is None:
            return compute(model, inputs, *args, **kwargs)
        if model.training:
            assert self._trainer is not None  # whose `compute_loss` this is
            last.given(self._trainer, compute, inputs, *args, **kwargs)
        result = compute(model, inputs, *args, **kwargs)
        last.loss_is_made(result)
        return result

    def take(self) -> tuple[dict[str, Any] | None, ComputeLoss | None]:
        """The last one that was kept and what makes its loss, which are let go of; no more are kept."""
        assert self._last is not None
        caught = self._last.batch, self._last.compute_loss
        self.drop()
        return caught

    def drop(self) -> None:
        """Let go of the last one; no more are kept. Harmless when none is."""
        if self._last is not None:
            self._last.remove()
        self._last = None


class Recomputing(Phase):
    """Every block under torch's own checkpoint, until the last batch can be profiled."""

    def __init__(self, run: Run, model: nn.Module, trainer: Trainer | None) -> None:
        self._run = run
        self._trainer = trainer
        self._maker = PolicyMaker(run.config, run.given, run.num_micro, trainer)
        self._batches = MicroBatches(trainer)
        self._waiting = FullRecompute(model, run.config)
        self._batches.catch(model)
        self._step = 0
        """Steps that were over when the present one began."""
        self._has_tried = False
        """Whether it was tried to have a policy for the first step already."""

    def step_begins(self, step: int, model: Any, optimizer: Any) -> None:
        self._step = step

    def micro_batch(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._batches.begin()
        self._waiting.begin_step()
        self._meet(inputs)
        with self._maker.inner_steps:
            return step(model, inputs, *args, **kwargs)

    def _meet(self, inputs: Any) -> None:
        if self._batches.meet(inputs):
            self._waiting.sizes.add(self._batches.shapes)

    def micro_batch_ends(self) -> None:
        self._run.ran.ran_early(self._batches.met)

    def loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self._meet(inputs)
            if self._run.num_steps == 0 and not self._has_tried:
                self._has_tried = True
                self._begin_within(compute, inputs, *args, **kwargs)
        return self._batches.loss(compute, model, inputs, *args, **kwargs)

    def _begin_within(self, compute: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Train within the budget from the first step on, if the first steps and the profile might take more."""
        run, trainer, model = self._run, self._trainer, self._waiting.model
        assert trainer is not None  # whose `compute_loss` this is
        if not isinstance(inputs, Mapping):
            return

        def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
            return loss_of(trainer, compute, model, batch, *args, **kwargs)

        self._waiting.remove()
        found = self._maker.estimated(model, trainer.optimizer, dict(inputs), compute_loss)
        if found is None:
            self._waiting = FullRecompute(model, run.config)
            self._waiting.begin_step()
            self._waiting.sizes.add(self._batches.shapes)
            return
        self._batches.drop()
        profile, policy = found
        run.phase = following = follow(run, model, policy, profile, self._step, self._maker, self._batches)
        assert isinstance(following, Evolving)  # nothing is estimated for a policy that was given
        following.begin_within(profile, policy, self._step, model, trainer.optimizer)
        run.note(self._step, "policy", **predictions(policy))
        run.save(changed=True)

    def optimizer_begins(self, args: TrainingArguments, model: Any) -> None:
        self._run.watch_optimizer(self._maker.optimizer, args, model)

    def optimizer_ends(self) -> None:
        self._maker.optimizer.end()

    def step_ends(self, step: int, model: Any, optimizer: Any) -> None:
        if self._run.num_steps == 1:
            check_called(self._waiting)
        num_more = self._run.num_steps - self._run.config.profile_steps
        if num_more >= 0 and is_ready(self._waiting, num_more):
            self._set_policy(step, model, optimizer)

    def _set_policy(self, step: int, model: Any, optimizer: Any) -> None:
        """Profile the last batch, solve, and follow the policy from the next step on."""
        run, maker, batches = self._run, self._maker, self._batches
        maker.all_sizes = any(of_all_ranks(len(self._waiting.sizes) > 1))
        self._waiting.remove()  # the profiler's own functions around the blocks must not stand around these
        profile, policy, is_provisional = maker.first(model, optimizer, *batches.take())
        run.phase = following = follow(run, model, policy, profile, step, maker, batches)
        following.begin_with(profile, policy, is_provisional)
        run.note(step, "policy", **predictions(policy), **{STEPS: run.num_steps})
        run.save(changed=True)

    def remove(self) -> None:
        self._waiting.remove()
        self._maker.remove()
        self._batches.drop()


class Following(Phase):
    """A policy that stays as it is."""

    evolution: Evolution | None = None

    def __init__(self, run: Run, handle: PolicyHandle) -> None:
        self._run = run
        self.handle = handle

    def begin_with(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        """Go on after a profile; a policy may be followed only until a step was counted."""
        self._run.ran.policy_is_set(profile, None)

    def restore(self, saved: Saved) -> None:
        """Go on where the run stood that wrote `saved`."""

    def micro_batch(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin_micro_batch()
        return step(model, inputs, *args, **kwargs)

    def _begin_micro_batch(self) -> None:
        self.handle.installation.begin_step()
        self.handle.library.fallbacks.clear()

    def micro_batch_ends(self) -> None:
        self._run.ran.ran(self._run.in_force.predicted_overhead_ms, self.handle.library.fallbacks)

    def step_ends(self, step: int, model: Any, optimizer: Any) -> None:
        self._run.count_step(step)
        if self._run.num_steps == 1:
            check_called(self.handle.installation)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        run = self._run
        found = metrics(run.in_force, run.profile, self.evolution, run.ran.overhead_ms) | run.fallback_figures()
        if is_own:
            run.ran.logged()
        return found

    def save(self, args: TrainingArguments, state: TrainerState) -> None:
        save_in_checkpoint(args, state, self._saved())

    def _saved(self) -> Saved:
        run = self._run
        shape_policies = [SavedShapePolicy(policy=run.in_force, profile=run.profile)]
        return Saved(shape_policies=shape_policies, memory_budget=run.config.memory_budget, history=run.history)

    def ends(self) -> None:
        self._run.save_rest()

    def remove(self) -> None:
        self.handle.remove()


class Evolving(Following):
    """A policy that follows the data (adapt/evolution.py), and others for other sizes of batch."""

    evolution: Evolution

    def __init__(
        self, run: Run, handle: PolicyHandle, policy_step: int, maker: PolicyMaker, batches: MicroBatches
    ) -> None:
        super().__init__(run, handle)
        self.evolution = Evolution(handle, run.config, policy_step, run.note, run.num_micro)
        self._maker = maker
        self._batches = batches
        self._step = 0
        """Steps that were over when the present one began."""

    def begin_with(self, profile: Profile, policy: Policy, is_provisional: bool) -> None:
        shapes = self._shapes_of(profile)
        self.evolution.add(shapes, profile, policy, is_provisional, self._maker.all_sizes)
        self._run.ran.policy_is_set(profile, shapes)

    def begin_within(self, profile: Profile, policy: Policy, step: int, model: Any, optimizer: Any) -> None:
        """Go on within the first micro-batch of a step, under a policy that is followed until a step was counted."""
        self.evolution.add(self._shapes_of(profile), profile, policy, is_provisional=True, was_measured=True)
        self.step_begins(step, model, optimizer)
        self._begin_micro_batch()
        self.evolution.choose(self._batches.shapes)

    def restore(self, saved: Saved) -> None:
        self.evolution.restore(saved)

    def step_begins(self, step: int, model: Any, optimizer: Any) -> None:
        self._step = step
        if self.evolution.wanted is not None or self.evolution.fresh_start.num_tries > 0:
            self._batches.catch(model)
        self.evolution.step_begins(step + 1, model, optimizer)

    def micro_batch(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step on one micro-batch, under the policy for its size, tried twice if memory runs out."""
        self._batches.begin()
        self._begin_micro_batch()
        self._meet(inputs)
        if not self._run.config.retry_out_of_memory:
            return step(model, inputs, *args, **kwargs)
        return run_with_retry(
            lambda: step(model, inputs, *args, **kwargs),
            self.handle.installation.model,
            self._tighten,
            self.evolution.advice,
        )

    def micro_batch_ends(self) -> None:
        self._run.ran.ran(*self.evolution.has_run(self.handle.library.fallbacks))

    def _meet(self, inputs: Any) -> None:
        """Put the policy for a micro-batch in force, as soon as it is tensors."""
        if self._batches.meet(inputs):
            self.evolution.choose(self._batches.shapes)

    def _tighten(self) -> str | None:
        obstacle = self.evolution.tighten(self._step + 1)
        if obstacle is None:
            self._show()
        return obstacle

    def loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self._meet(inputs)
        return self._batches.loss(compute, model, inputs, *args, **kwargs)

    def optimizer_begins(self, args: TrainingArguments, model: Any) -> None:
        self.evolution.backward_is_over()
        self._run.watch_optimizer(self._maker.optimizer, args, model)  # a run that resumes has not seen it yet

    def optimizer_ends(self) -> None:
        if self._maker.optimizer.is_counting:
            self._maker.optimizer.end()

    def step_ends(self, step: int, model: Any, optimizer: Any) -> None:
        super().step_ends(step, model, optimizer)
        evolution, history = self.evolution, self._run.history
        started, num_events = time.perf_counter(), len(history)
        changed = evolution.step_ends(step)
        if self._batches.is_catching:
            changed |= self._profile_again(step, model, optimizer)
        if changed:
            self._show()
        if len(history) > num_events:
            self._run.save(changed)
        if evolution.is_busy or len(history) > num_events:
            evolution.tracking_ms += (time.perf_counter() - started) * 1e3

    def _profile_again(self, step: int, model: Any, optimizer: Any) -> bool:
        """Make a policy with the step's batch where one is wanted; returns whether there is one."""
        wanted, self.evolution.wanted = self.evolution.wanted, None
        if wanted is not None:
            return self._add_size(wanted, step, model, optimizer)
        return self.evolution.fresh_start.num_tries > 0 and self._start_over(step, model, optimizer)

    def _add_size(self, wanted: BatchShapes, step: int, model: Any, optimizer: Any) -> bool:
        """Profile and solve for a size of batch that was seen often, with the step's batch made to that size."""
        self._maker.all_sizes = True
        shape_policies = self.evolution.shape_policies
        try:
            with self.handle.taken_off():
                made = self._maker.for_size(wanted, model, optimizer, self.evolution, *self._batches.take())
        except RefusedSizeError as reason:
            log.warning("Adacc: batches of %s get no policy of their own: %s", describe(wanted), reason)
            shape_policies.refuse(wanted)
            self._run.note(step, "memory", reason=f"{describe(wanted)}: {reason}")
            return False
        if made is None:
            return False
        shapes, profile, policy = made
        self.evolution.add(shapes, profile, policy, was_measured=True)
        if shapes != wanted:  # and so on: each batch of the bucket would want a policy that fits it better
            shape_policies.refuse(wanted)
        self._run.note(step, "policy", **predictions(policy), reason=f"for batches of {describe(shapes)}")
        log.info("Adacc: for batches of %s: %s", describe(shapes), policy.summary())
        return True

    def _start_over(self, step: int, model: Any, optimizer: Any) -> bool:
        """Profile the step's batch and start over with its policy, if it is one to do so with."""
        why = self.evolution.fresh_start.why
        if not self.evolution.can_start_over():
            if self.evolution.fresh_start.num_tries == 0:
                self._stay(step, why, "no batch came that calls all of them")
            return False
        self.evolution.fresh_start.num_tries = 0
        try:
            with self.handle.taken_off():
                made = self._maker.for_all_blocks(model, optimizer, self.evolution, *self._batches.take())
        except RefusedSizeError as reason:
            self._stay(step, why, str(reason))
            return False
        profile, policy = made
        self.evolution.start_over(self._shapes_of(profile), profile, policy)
        self._run.note(step, "policy", **predictions(policy), reason=why)
        log.info("Adacc: %s: %s", why, policy.summary())
        return True

    def _shapes_of(self, profile: Profile) -> BatchShapes | None:
        """The sizes of the batch that was just profiled: the first rank's, whose profile all ranks share."""
        if profile.measured:
            return from_plain(profile.measured[0][0])
        return from_first_rank(lambda: self._batches.met)

    def _stay(self, step: int, why: str, obstacle: str) -> None:
        """Say that a run goes on as it is, although `why`."""
        reason = f"{why}, which stay {LEFT_AS[why]}: {obstacle}"
        log.warning("Adacc: %s", reason)
        self._batches.drop()
        self._run.note(step, "memory", reason=reason)

    def _show(self) -> None:
        """Let the run's policy and profile be those in force."""
        rectifier = self.evolution.shown.rectifier
        self._run.show(rectifier.policy, rectifier.priced)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        if is_own:
            self.evolution.logged(logs)
        return super().figures(logs, is_own)

    def _saved(self) -> Saved:
        return self.evolution.saved(self._run.history)

    def remove(self) -> None:
        self.evolution.cancel()
        super().remove()
        self._maker.remove()
        self._batches.drop()


class Compiled(Phase):
    """Compiled graphs, cut within the budget (compiler/compiled_run.py)."""

    def __init__(self, run: Run, model: Any, checkpoint: str | Path | None) -> None:
        self._run = run
        begin = import_module(COMPILED_RUN).begin_compiled_run
        self._compiled, run.history = begin(run.config, model, run.note, run.given, checkpoint)

    def step_begins(self, step: int, model: Any, optimizer: Any) -> None:
        self._compiled.step_begins(model, optimizer)

    def loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = compute(model, inputs, *args, **kwargs)
        self._compiled.loss_is_made(result, inputs)
        return result

    def step_ends(self, step: int, model: Any, optimizer: Any) -> None:
        num_events = len(self._run.history)
        self._compiled.step_ends(step, model)
        if self._compiled.fell_back:
            self._run.ran.ran(0.0, {UNCOMPILED: 1})
            self._run.count_step(step)
        if len(self._run.history) > num_events:
            self._run.save_by(self._compiled.save)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        return self._compiled.metrics() | self._run.fallback_figures()

    def save(self, args: TrainingArguments, state: TrainerState) -> None:
        folder = checkpoint_folder(args, state)
        if folder.is_dir():
            self._compiled.save(folder, self._run.history)

    def remove(self) -> None:
        self._run.compiled_policy = self._compiled.policy
        self._compiled.remove()


def follow(
    run: Run,
    model: nn.Module,
    policy: Policy,
    profile: Profile | None,
    policy_step: int,
    maker: PolicyMaker,
    batches: MicroBatches,
) -> Following:
    """The phase that has `policy` in force; one that was given, or is known without its profile, stays as it is."""
    handle = PolicyHandle(model, policy, run.config.block_classes, profile)
    run.show(policy, profile)
    log.info("Adacc: %s", policy.summary())
    if run.given is None and profile is not None:
        return Evolving(run, handle, policy_step, maker, batches)
    return Following(run, handle)


def resume(run: Run, model: nn.Module, saved: Saved, step: int, trainer: Trainer | None) -> None:
    """Go on at `step` with what was given, or with what a checkpoint holds."""
    first = saved.shape_policies[0]
    run.history = list(saved.history)
    maker, batches = PolicyMaker(run.config, run.given, run.num_micro, trainer), MicroBatches(trainer)
    policy_step = step if saved.policy_step is None else saved.policy_step
    run.phase = following = follow(run, model, first.policy, first.profile, policy_step, maker, batches)
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
