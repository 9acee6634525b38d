"""AdaccCallback: profile the first steps of a Trainer's run, solve a policy, train under it, keep it in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.adapt.checkpoint_files import (
    Saved,
    SavedShapePolicy,
    checkpoint_folder,
    drop_files,
    going_on,
    load_from_checkpoint,
)
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import POLICY_FILE, PROFILE_FILE
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.callbacks.one_run import Phase, Run
from adacc_hf.callbacks.phases import Compiled, Recomputing, resume
from adacc_hf.callbacks.policy_maker import PolicySource
from adacc_hf.callbacks.preconditions import (
    check_arguments,
    is_compiled,
    refuse_context_parallel,
    refuse_data_parallel,
    refuse_second_callback,
    refuse_second_run,
    warn_of_checkpointing,
    warn_of_short_run,
)
from adacc_hf.callbacks.trainer import OwnLogs, TrainerGuard, Unguarded, add_to_log, is_training_log
from adacc_hf.torch_glue.ranks import from_first_rank

__all__ = ["POLICY_FILE", "PROFILE_FILE", "AdaccCallback", "PolicySource"]


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

    For example:

        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[AdaccCallback(memory_budget="20GiB")])
    """

    def __init__(
        self, config: AdaccConfig | None = None, *, policy: PolicySource | None = None, **overrides: Any
    ) -> None:
        check_arguments(config, policy)
        self.config = (config or AdaccConfig()).with_overrides(**overrides)
        self._run = Run(self.config, policy)
        self._guard: TrainerGuard | Unguarded = Unguarded(None)
        self._own_logs = OwnLogs(None)

    @property
    def policy(self) -> Policy | None:
        """The policy in force, once it is set."""
        return self._run.policy

    @property
    def profile(self) -> Profile | None:
        """What the policy in force was solved for; None where only the policy is known."""
        return self._run.profile

    @property
    def compiled_policy(self) -> Any:
        """The `compiler.CompiledPolicy` of a finished run with `torch_compile=True`, which has no other policy; None
        before."""
        return self._run.compiled_policy

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened in the run: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory",
        "fallback") and its figures; the last counts all steps that ran otherwise than the policy says for one reason.
        A resumed run goes on with that of its checkpoint."""
        return self._run.history

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        refuse_second_run(self, self._guard)
        self.detach()
        refuse_data_parallel(args)
        self._run.begin(args, state)
        self._guard = TrainerGuard.around_caller(self, on_failure=self.detach) or Unguarded(args)
        self._own_logs = OwnLogs(self._guard.trainer)
        self._guard.wrap("training_step", self._training_step)
        self._guard.wrap("compute_loss", self._compute_loss)
        try:
            if self._guard.trainer is not None:
                refuse_second_callback(self, self._guard.trainer)
                refuse_context_parallel(self._guard.trainer)
            self._begin(args, state, model)
        except BaseException:
            self.detach()
            raise

    def _begin(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        run, trainer = self._run, self._guard.trainer
        if is_compiled(args, trainer):
            run.phase = Compiled(run, model, self._guard.checkpoint)
            return
        warn_of_checkpointing(args, self.config)
        saved = self._known_policy()
        if saved is not None:
            resume(run, model, saved, state.global_step, trainer)
            return
        warn_of_short_run(state, self.config.profile_steps)
        run.phase = Recomputing(run, model, trainer)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._run.phase.step_begins(state.global_step, model, optimizer)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step on one micro-batch."""
        result = self._run.phase.micro_batch(*args, **kwargs)
        self._run.phase.micro_batch_ends()  # within its first one a run may come by a policy
        return result

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss."""
        return self._run.phase.loss(*args, **kwargs)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._run.phase.optimizer_begins(args, model)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.phase.optimizer_ends()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._run.num_steps += 1
        self._run.phase.step_ends(state.global_step, model, optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = checkpoint_folder(args, state)
        with going_on(folder, "a run that resumes from it will profile again"):
            drop_files(folder)
            self._run.phase.save(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        is_own = self._own_logs.has_another()
        if is_training_log(logs):
            add_to_log(logs, state, self._run.phase.figures(logs, is_own))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.phase.ends()
        self.detach()

    def detach(self) -> None:
        """Take everything off the model and the Trainer. Harmless when nothing is on."""
        phase, self._run.phase = self._run.phase, Phase()
        phase.remove()
        self._guard.leave(self)
        self._guard, self._own_logs = Unguarded(None), OwnLogs(None)

    def _known_policy(self) -> Saved | None:
        """The policy that was given, or what the checkpoint holds that training resumes from."""
        given = self._run.given
        if isinstance(given, (str, Path, Policy)):
            policy = given if isinstance(given, Policy) else Policy.load(given)
            return Saved(shape_policies=[SavedShapePolicy(policy=policy, profile=None)])
        checkpoint = self._guard.checkpoint
        if checkpoint is None:
            return None
        # The first rank decides, also where the others do not see its files: all ranks must profile, or none.
        return from_first_rank(lambda: load_from_checkpoint(checkpoint, self.config.memory_budget))

    def __repr__(self) -> str:
        return f"AdaccCallback({self.config!r})"
