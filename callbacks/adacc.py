"""AdaccCallback: profile the first steps of a Trainer's run, solve a policy, train under it, keep it in step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.adapt.checkpoint_files import (
    Saved,
    SavedSituation,
    drop_files,
    going_on,
    load_from_checkpoint,
    save_files,
    save_history,
    save_in_checkpoint,
)
from adacc_hf.adapt.evolution import Evolution
from adacc_hf.adapt.shape_policies import metrics, predictions
from adacc_hf.adapt.step_retry import run_with_retry
from adacc_hf.adapt.what_ran import STEPS, UNCOMPILED, WhatRan, num_fallback_steps
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import POLICY_FILE, PROFILE_FILE
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.callbacks.policy_maker import PolicyMaker, PolicySource, RefusedSizeError, Waiting, is_ready
from adacc_hf.callbacks.preconditions import (
    check_arguments,
    refuse_context_parallel,
    refuse_data_parallel,
    refuse_second_callback,
    refuse_second_run,
    warn_of_checkpointing,
    warn_of_short_run,
)
from adacc_hf.callbacks.trainer import OwnLogs, TrainerGuard, add_to_log, compiler_of, is_training_log, loss_of
from adacc_hf.compiler.compiled_run import begin_compiled_run, is_compiled
from adacc_hf.run.executor import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes, describe, from_plain
from adacc_hf.torch_glue.ranks import from_first_rank, of_all_ranks

if TYPE_CHECKING:
    from adacc_hf.compiler import CompiledPolicy
    from adacc_hf.compiler.compiled_run import CompiledRun

log = logging.getLogger(__name__)

__all__ = ["POLICY_FILE", "PROFILE_FILE", "AdaccCallback", "PolicySource"]

REPORTS_LACK = "training goes on, and reports show what is there"
HISTORY_PARTS = 64
"""The part of a run's history that may be unwritten for a while: one event in 64."""


class AdaccCallback(TrainerCallback):
    """Trains within a memory budget.

    The first `profile_steps` steps run under torch's own checkpointing; then the last batch, or the next one that calls
    every block, is profiled, a policy is solved and followed. As training goes on the policy follows the data
    (adapt/evolution.py). With `torch_compile=True` the decisions are made inside the compiled graphs
    (compiler/compiled_run.py). A checkpoint carries all of it, and a run that resumes with the same `memory_budget` on
    as many ranks goes on with it. When training ends, or fails, the model is as it was.

    `policy` overrides the solver: a Policy, a file, or a function of the profile. Nothing ever changes such a policy;
    a Policy or a file is followed from the first step, and goes before a checkpoint's. Fields of `AdaccConfig` may be
    given as keyword arguments instead of a config, or on top of one.

    | logged key | unit |
    |---|---|
    | `adacc/stored_gib` | GiB that the policy keeps for backward, predicted |
    | `adacc/peak_gib` | GiB live at the step's peak, predicted |
    | `adacc/overhead_ms` | milliseconds per micro-batch since the last log, for replay and codecs, predicted |
    | `adacc/fallback_steps` | steps so far that ran, in part or all, under full recomputation or on another path |
    | `adacc/compression_rate` | stored bytes over those of plain training |
    | `adacc/measured_peak_gib` | GiB live at the peak of the last step that was counted |
    | `adacc/error` | largest relative L2 error of a compressed activation, at the last tracking step |
    | `adacc/gradient_error` | the same of a sampled block's gradient |
    | `adacc/tracking_ms` | milliseconds of tracking, solving, counting memory and writing files so far |

    Example:
        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[AdaccCallback(memory_budget="20GiB")])
    """

    def __init__(
        self, config: AdaccConfig | None = None, *, policy: PolicySource | None = None, **overrides: Any
    ) -> None:
        check_arguments(config, policy)
        self.config = (config or AdaccConfig()).with_overrides(**overrides)
        self.policy: Policy | None = None
        """The policy in force, once it is set."""
        self.profile: Profile | None = None
        self.compiled_policy: CompiledPolicy | None = None
        """What was decided for the graphs of a finished run with `torch_compile=True`, which has no other policy."""
        self.history: list[dict[str, Any]] = []
        """What happened in the run: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory",
        "fallback") and its figures; the last counts all steps that ran otherwise than the policy says for one reason.
        A resumed run goes on with that of its checkpoint."""
        self._given = policy
        self._handle: PolicyHandle | None = None
        self._waiting: Waiting | None = None
        self._maker: PolicyMaker | None = None
        self._shapes: BatchShapes | None = None
        self._guard: TrainerGuard | None = None
        self._own_logs = OwnLogs(None)
        self._compiled: CompiledRun | None = None
        self._evolution: Evolution | None = None
        self._ran = WhatRan()
        self._num_steps = self._num_saved = 0
        self._is_unsaved = self._is_uncounted = False
        self._has_tried = False
        """Whether it was tried to have a policy for the first step already."""
        self._global_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        refuse_second_run(self, self._guard)
        self.detach()
        refuse_data_parallel(args)
        self.policy, self.profile, self.history = None, None, []
        self._ran = WhatRan()
        self._num_steps = self._num_saved = 0
        self._is_unsaved = self._is_uncounted = self._has_tried = False
        self._guard = TrainerGuard.around_caller(self, on_failure=self.detach)
        trainer = None if self._guard is None else self._guard.trainer
        self._own_logs = OwnLogs(trainer)
        self._maker = PolicyMaker(self.config, self._given, args.gradient_accumulation_steps, trainer)
        if self._guard is not None:
            self._guard.wrap("training_step", self._training_step)
            self._guard.wrap("compute_loss", self._compute_loss)
        try:
            if self._guard is not None:
                refuse_second_callback(self, trainer)
                refuse_context_parallel(trainer)
            self._begin(args, state, model)
        except BaseException:
            self.detach()
            raise

    def _begin(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        if is_compiled(args, None if self._guard is None else compiler_of(self._guard.trainer)):
            checkpoint = self._checkpoint(args)
            begun = begin_compiled_run(self.config, model, self._note, self._given, checkpoint)
            self._compiled, self.history = begun
            return
        warn_of_checkpointing(args, self.config)
        saved = self._known_policy(args)
        if saved is not None:
            self._resume(args, state, model, saved)
            return
        warn_of_short_run(state, self.config.profile_steps)
        self._waiting = Waiting(model, self.config)
        self._maker.catch_batches(model)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._global_step = state.global_step
        if self._compiled is not None:
            self._compiled.step_begins(model, optimizer)
        if self._evolution is not None:
            is_wanted = self._evolution.wanted is not None or self._evolution.num_tries > 0
            if is_wanted and not self._maker.catches_batches:
                self._maker.catch_batches(model)
            self._evolution.step_begins(state.global_step + 1, model, optimizer)

    def _training_step(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step on one micro-batch, under the policy for its size, tried twice if memory runs out."""
        result = self._run_step(step, model, inputs, *args, **kwargs)
        self._note_what_ran()
        return result

    def _note_what_ran(self) -> None:
        if self._waiting is not None:
            self._ran.ran_early(self._shapes)
        elif self._handle is not None:
            calls = self._handle.library.fallbacks
            known = (self.policy.predicted_overhead_ms, calls)
            self._ran.ran(*(known if self._evolution is None else self._evolution.has_run(calls)))

    def _run_step(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        evolution, self._shapes = self._evolution, None
        if self._handle is not None:
            self._handle.installation.begin_step()
            self._handle.library.fallbacks.clear()
        if self._waiting is not None:
            self._waiting.begin_step()
        self._meet(inputs)
        if self._waiting is not None:
            with self._maker.inner_steps:
                return step(model, inputs, *args, **kwargs)
        if evolution is None:
            return step(model, inputs, *args, **kwargs)
        if not self.config.retry_out_of_memory:
            return step(model, inputs, *args, **kwargs)
        return run_with_retry(
            lambda: step(model, inputs, *args, **kwargs),
            self._handle.installation.model,
            self._tighten,
            evolution.advice,
        )

    def _meet(self, inputs: Any) -> None:
        """Put the policy for a micro-batch in force, as soon as it is tensors: reinforcement learning makes them of
        samples within the step."""
        if self._shapes is None and isinstance(inputs, Mapping):
            self._shapes = batch_shapes(inputs)
            if self._waiting is not None:
                self._waiting.sizes.add(self._shapes)
            if self._evolution is not None:
                self._evolution.choose(self._shapes)

    def _compute_loss(
        self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:  # named as the Trainer names them
        """The Trainer's loss, which a profile may need, and at whose graph a compiled run looks."""
        maker = self._maker  # which a detach within the loss would take away
        if model.training:
            self._meet(inputs)
            if self._waiting is not None and self._num_steps == 0 and not self._has_tried:
                self._has_tried = True
                self._begin_within(compute, inputs, *args, **kwargs)
            maker.loss_is_asked(compute, inputs, *args, **kwargs)
        result = compute(model, inputs, *args, **kwargs)
        maker.loss_is_made(result)
        if self._compiled is not None:
            self._compiled.loss_is_made(result, inputs)
        return result

    def _begin_within(self, compute: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Train within the budget from the first step on, if the first steps and the profile might take more."""
        trainer, model = self._guard.trainer, self._waiting.model
        if not isinstance(inputs, Mapping):
            return

        def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
            return loss_of(trainer, compute, model, batch, *args, **kwargs)

        self._waiting.remove()
        found = self._maker.estimated(model, trainer.optimizer, dict(inputs), compute_loss)
        if found is None:
            self._waiting = Waiting(model, self.config)
            self._waiting.begin_step()
            self._waiting.sizes.add(self._shapes)
            return
        self._waiting = None
        self._maker.drop_batches()
        self.profile, policy = found
        self._follow(trainer.args, model, policy, self._global_step)
        self._evolution.add(self._profiled_shapes(), self.profile, policy, is_provisional=True, was_measured=True)
        self._evolution.step_begins(self._global_step + 1, model, trainer.optimizer)
        self._handle.installation.begin_step()
        self._evolution.choose(self._shapes)
        self._note(self._global_step, "policy", **predictions(policy))
        if trainer.state.is_world_process_zero:
            self._save(trainer.args, True)

    def _tighten(self) -> str | None:
        obstacle = self._evolution.tighten(self._global_step + 1)
        if obstacle is None:
            self._show_policy()
        return obstacle

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self._maker is None:
            return
        if self._evolution is not None:
            self._evolution.backward_is_over()
        watch = self._maker.optimizer
        if self._compiled is None and not watch.has_seen and self._num_steps + 1 >= self.config.profile_steps:
            watch.begin(args, model)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._maker is not None:
            self._maker.optimizer.end()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._maker is None:  # detached in the middle of the run
            return
        self._num_steps += 1
        if self._compiled is not None:
            num_events = len(self.history)
            self._compiled.step_ends(state.global_step, model)
            if self._compiled.fell_back:
                self._ran.ran(0.0, {UNCOMPILED: 1})
                self._ran.step_ends(state.global_step, self.history)
            if len(self.history) > num_events and state.is_world_process_zero:
                with going_on(args.output_dir, REPORTS_LACK):
                    self._compiled.save(args.output_dir, self.history)
            return
        self._is_uncounted |= self._ran.step_ends(state.global_step, self.history)
        if self._num_steps == 1:
            self._check_called()
        if self._handle is None:
            num_more = self._num_steps - self.config.profile_steps
            if num_more >= 0 and is_ready(self._waiting, num_more):
                self._set_policy(args, state, model, optimizer)
        elif self._evolution is not None:
            started, num_events = time.perf_counter(), len(self.history)
            changed = self._evolution.step_ends(state.global_step)
            if self._evolution.wanted is not None and self._maker.catches_batches:
                changed |= self._add_size(state.global_step, model, optimizer)
            elif self._evolution.num_tries > 0 and self._maker.catches_batches:
                changed |= self._add_blocks(state.global_step, model, optimizer)
            if changed:
                self._show_policy()
            if len(self.history) > num_events and state.is_world_process_zero:
                self._save(args, changed)
            if self._evolution.is_busy or len(self.history) > num_events:
                self._evolution.tracking_ms += (time.perf_counter() - started) * 1e3

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with going_on(folder, "a run that resumes from it will profile again"):
            drop_files(folder)
            if self._compiled is not None and folder.is_dir():
                self._compiled.save(folder, self.history)
            if self.policy is not None:
                save_in_checkpoint(args, state, self._saved())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        is_own = self._own_logs.has_another()
        if self._compiled is not None and is_training_log(logs):
            fallback_steps = {f"adacc/{STEPS}": num_fallback_steps(self.history)}
            add_to_log(logs, state, self._compiled.metrics() | fallback_steps)
        if self.policy is None or not is_training_log(logs):
            return
        if self._evolution is not None and is_own:
            self._evolution.logged(logs)
        figures = metrics(self.policy, self.profile, self._evolution, self._ran.overhead_ms)
        add_to_log(logs, state, figures | {f"adacc/{STEPS}": num_fallback_steps(self.history)})
        if is_own:
            self._ran.logged()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_unsaved = self._num_saved < len(self.history) or self._is_uncounted
        if self._compiled is None and is_unsaved and state.is_world_process_zero:
            self._save(args, self._is_unsaved, is_last=True)
        self.detach()

    def detach(self) -> None:
        """Take everything off the model and the Trainer. Harmless when nothing is on."""
        if self._evolution is not None:
            self._evolution.cancel()
        if self._compiled is not None:
            self.compiled_policy = self._compiled.policy
        for attached in (self._handle, self._waiting, self._maker, self._compiled):
            if attached is not None:
                attached.remove()
        if self._guard is not None:
            self._guard.leave(self)
        self._handle = self._waiting = self._maker = self._guard = self._compiled = None
        self._evolution = self._shapes = None
        self._own_logs = OwnLogs(None)

    def _checkpoint(self, args: TrainingArguments) -> str | None:
        """The folder that training resumes from."""
        return self._guard.checkpoint if self._guard is not None else args.resume_from_checkpoint

    def _known_policy(self, args: TrainingArguments) -> Saved | None:
        """The policy that was given, or what the checkpoint holds that training resumes from."""
        if isinstance(self._given, (str, Path, Policy)):
            policy = self._given if isinstance(self._given, Policy) else Policy.load(self._given)
            return Saved(situations=[SavedSituation(policy=policy, profile=None)])
        folder = self._checkpoint(args)
        if folder is None:
            return None
        # The first rank decides, also where the others do not see its files: all ranks must profile, or none.
        return from_first_rank(lambda: load_from_checkpoint(folder, self.config.memory_budget))

    def _resume(self, args: TrainingArguments, state: TrainerState, model: Any, saved: Saved) -> None:
        first = saved.situations[0]
        self.profile, self.history = first.profile, list(saved.history)
        self._follow(args, model, first.policy, state.global_step if saved.policy_step is None else saved.policy_step)
        if self._evolution is not None:
            self._evolution.restore(saved)
        self._note(state.global_step, "policy", **predictions(first.policy))

    def _set_policy(self, args: TrainingArguments, state: TrainerState, model: Any, optimizer: Any) -> None:
        """Profile the last batch, solve, and follow the policy from the next step on."""
        self._maker.all_sizes = any(of_all_ranks(len(self._waiting.sizes) > 1))
        self._waiting.remove()  # the profiler's own functions around the blocks must not stand around these
        self.profile, policy, is_provisional = self._maker.first(model, optimizer)
        self._waiting = None
        self._follow(args, model, policy, state.global_step)
        shapes = None
        if self._evolution is not None:
            shapes = self._profiled_shapes()
            self._evolution.add(shapes, self.profile, policy, is_provisional, self._maker.all_sizes)
        self._ran.policy_is_set(self.profile, shapes)
        self._note(state.global_step, "policy", **predictions(policy), **{STEPS: self._num_steps})
        if state.is_world_process_zero:
            self._save(args, True)

    def _add_size(self, step: int, model: Any, optimizer: Any) -> bool:
        """Profile and solve for a size of batch that was seen often, with the step's batch made to that size."""
        wanted, self._evolution.wanted = self._evolution.wanted, None
        self._maker.all_sizes = True
        situations = self._evolution.situations
        try:
            with self._handle.taken_off():
                made = self._maker.for_size(wanted, model, optimizer, self._evolution)
        except RefusedSizeError as reason:
            log.warning("Adacc: batches of %s get no policy of their own: %s", describe(wanted), reason)
            situations.refuse(wanted)
            self._note(step, "memory", reason=f"{describe(wanted)}: {reason}")
            return False
        if made is None:
            return False
        shapes, profile, policy = made
        self._evolution.add(shapes, profile, policy, was_measured=True)
        if shapes != wanted:  # and so on: each batch of the bucket would want a policy that fits it better
            situations.refuse(wanted)
        self._note(step, "policy", **predictions(policy), reason=f"for batches of {describe(shapes)}")
        log.info("Adacc: for batches of %s: %s", describe(shapes), policy.summary())
        return True

    def _add_blocks(self, step: int, model: Any, optimizer: Any) -> bool:
        """Profile the step's batch and start over with its policy, if it trains all blocks that any batch does."""
        if not self._evolution.can_start_over():
            if self._evolution.num_tries == 0:
                self._keep_blocks(step, "no batch trains them and all others")
            return False
        self._evolution.num_tries = 0
        try:
            with self._handle.taken_off():
                profile, policy = self._maker.for_more_blocks(model, optimizer, self._evolution)
        except RefusedSizeError as reason:
            self._keep_blocks(step, str(reason))
            return False
        self.profile = profile
        self._evolution.start_over(self._profiled_shapes(), profile, policy)
        self._note(step, "policy", **predictions(policy), reason="more blocks are trained than before")
        log.info("Adacc: more blocks are trained than before: %s", policy.summary())
        return True

    def _profiled_shapes(self) -> BatchShapes | None:
        """The sizes of the batch that was just profiled: the first rank's, whose profile all ranks share."""
        if self.profile is not None and self.profile.measured:
            return from_plain(self.profile.measured[0][0])
        return from_first_rank(lambda: self._shapes)

    def _keep_blocks(self, step: int, reason: str) -> None:
        """Say why blocks that are trained by now stay under torch's checkpoint."""
        reason = f"blocks that are trained by now stay under torch's checkpoint: {reason}"
        log.warning("Adacc: %s", reason)
        self._maker.drop_batches()
        self._note(step, "memory", reason=reason)

    def _follow(self, args: TrainingArguments, model: Any, policy: Policy, policy_step: int) -> None:
        """Put `policy` in force; a policy that was given, or is known without its profile, stays as it is."""
        self._handle = PolicyHandle(model, policy, self.config.block_classes, self.profile)
        self.policy = policy
        if self._given is None and self.profile is not None:
            num_micro = args.gradient_accumulation_steps
            self._evolution = Evolution(self._handle, self.config, policy_step, self._note, num_micro)
        log.info("Adacc: %s", policy.summary())

    def _show_policy(self) -> None:
        """Let `policy` and `profile` be those in force."""
        rectifier = self._evolution.shown.rectifier
        self.policy, self.profile = rectifier.policy, rectifier.priced

    def _saved(self) -> Saved:
        if self._evolution is None:
            situations = [SavedSituation(policy=self.policy, profile=self.profile)]
            return Saved(situations=situations, memory_budget=self.config.memory_budget, history=self.history)
        return self._evolution.saved(self.history)

    def _save(self, args: TrainingArguments, changed: bool, is_last: bool = False) -> None:
        """Write the policy if it changed, and what happened, into the run's folder.

        Of a long history only every so many events: all of it is written each time.
        """
        self._is_unsaved |= changed
        with going_on(args.output_dir, REPORTS_LACK):
            if self._is_unsaved:
                save_files(args.output_dir, self.policy, self.profile)
                self._is_unsaved = False
            if changed or is_last or (len(self.history) - self._num_saved) * HISTORY_PARTS >= len(self.history):
                save_history(args.output_dir, self.history)
                self._num_saved = len(self.history)

    def _check_called(self) -> None:
        """Report that no block's function was called: something replaced their forward at class level."""
        installation = self._waiting if self._handle is None else self._handle.installation
        uncalled = installation.uncalled()
        if len(uncalled) == len(installation.blocks):
            raise RuntimeError(
                f"{len(uncalled)} of {len(installation.blocks)} blocks, {uncalled[0]} first, never reached Adacc in "
                f"the first step: their class's forward was replaced (a fast-kernel patch?); name their class with "
                f"AdaccConfig(block_classes=...) so that their forward is wrapped instead"
            )

    def _note(self, step: int, event: str, **figures: Any) -> None:
        self.history.append({"step": step, "event": event, **figures})

    def __repr__(self) -> str:
        return f"AdaccCallback({self.config!r})"
