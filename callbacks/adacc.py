"""AdaccCallback: profile the first steps of a Trainer's run, solve a policy, train under it, keep it in step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.adapt.checkpoint_files import Saved, drop_files, going_on, load_from_checkpoint
from adacc_hf.adapt.policy_builder import PolicySource
from adacc_hf.adapt.session import AdaccSession, check_arguments
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import POLICY_FILE, PROFILE_FILE
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.callbacks.compiled_phase import Compiled
from adacc_hf.callbacks.preconditions import (
    is_compiled,
    refuse_context_parallel,
    refuse_data_parallel,
    refuse_second_callback,
    refuse_second_run,
    warn_of_checkpointing,
)
from adacc_hf.callbacks.trainer import (
    OwnLogs,
    TrainerGuard,
    TrainerLoop,
    Unguarded,
    add_to_log,
    checkpoint_folder,
    is_training_log,
    loss_by,
)
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank

__all__ = ["POLICY_FILE", "PROFILE_FILE", "AdaccCallback", "PolicySource"]


class AdaccCallback(TrainerCallback):
    """Trains within a memory budget.

    A policy is made before the first step, from a profile of small parts of the first batch, or of the whole batch if
    the model cannot run on parts. If the first batch leaves blocks out, or ranks hold parts of the parameters (FSDP,
    ZeRO-3), the first `profile_steps` steps run under torch's checkpoint instead; then the next batch that calls every
    block is profiled. As training goes on, the policy follows the data (adapt/controller.py). With `torch_compile=True`
    the decisions are made inside the compiled graphs (compiler/compiled_run.py). A checkpoint carries all of it, and a
    run that resumes with the same `memory_budget` on as many ranks goes on with it. When training ends, or fails, the
    model is as it was.

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
        check_arguments(type(self).__name__, config, policy)
        self.config = (config or AdaccConfig()).with_overrides(**overrides)
        self._given = policy
        self._session: AdaccSession | None = None
        """The session of the present run, or of the last one."""
        self._guard: TrainerGuard | Unguarded = Unguarded(None)
        self._own_logs = OwnLogs(None)
        self._compiled_policy: Any = None

    @property
    def session(self) -> AdaccSession | None:
        """The AdaccSession of the present run, or of the last one; None before any."""
        return self._session

    @property
    def policy(self) -> Policy | None:
        """The policy in force, once it is set."""
        return None if self._session is None else self._session.policy

    @property
    def profile(self) -> Profile | None:
        """What the policy in force was solved for; None where only the policy is known."""
        return None if self._session is None else self._session.profile

    @property
    def compiled_policy(self) -> Any:
        """The `compiler.CompiledPolicy` of a finished run with `torch_compile=True`, which has no other policy; None
        before."""
        return self._compiled_policy

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened in the run: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory",
        "fallback") and its figures; the last counts all steps that ran otherwise than the policy says for one reason.
        A resumed run goes on with that of its checkpoint."""
        return [] if self._session is None else self._session.history

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        refuse_second_run(self, self._guard)
        self.detach()
        refuse_data_parallel(args)
        self._guard = TrainerGuard.around_caller(self, on_failure=self.detach) or Unguarded(args)
        self._own_logs = OwnLogs(self._guard.trainer)
        self._guard.wrap("training_step", self._training_step)
        self._guard.wrap("compute_loss", self._compute_loss)
        loop = TrainerLoop(args, state, self._guard.trainer)
        optimizer = kwargs.get("optimizer")
        self._session = AdaccSession(model, optimizer, self.config, policy=self._given, loop=loop)
        try:
            if self._guard.trainer is not None:
                refuse_second_callback(self, self._guard.trainer)
                refuse_context_parallel(self._guard.trainer)
            self._begin(args, state, self._session)
        except BaseException:
            self.detach()
            raise

    def _begin(self, args: TrainingArguments, state: TrainerState, session: AdaccSession) -> None:
        if is_compiled(args, self._guard.trainer):
            session.begin_with(Compiled(session.state, self._guard.checkpoint))
            return
        warn_of_checkpointing(args, self.config)
        is_known = isinstance(self._given, (str, Path, Policy))
        session.begin(None if is_known else self._saved(), state.global_step)

    def _saved(self) -> Saved | None:
        """What the checkpoint holds that training resumes from."""
        checkpoint = self._guard.checkpoint
        if checkpoint is None:
            return None
        # The first rank decides, also where the others do not see its files: all ranks must profile, or none.
        return broadcast_from_first_rank(lambda: load_from_checkpoint(checkpoint, self.config.memory_budget))

    @property
    def _present(self) -> AdaccSession:
        """The session of the present run."""
        assert self._session is not None
        return self._session

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._present.begin_step(state.global_step, optimizer)

    def _training_step(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's step on one micro-batch."""
        return self._present.train(partial(step, model, inputs, *args, **kwargs), inputs)

    def _compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss, for training and evaluation."""
        phase = self._present.phase
        if model.training:
            phase.forward_begins(inputs, loss_by(self._guard.trainer, compute, *args, **kwargs))
        result = compute(model, inputs, *args, **kwargs)
        self._present.phase.loss_is_made(result, inputs)
        return result

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._present.optimizer_begins()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._present.optimizer_ends()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._present.end_step(state.global_step, optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = checkpoint_folder(args, state)
        with going_on(folder, "a run that resumes from it will profile again"):
            drop_files(folder)
            self._present.phase.save(folder)

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
            add_to_log(logs, state, self._present.figures(logs, is_own))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._present.phase.ends()
        self.detach()

    def detach(self) -> None:
        """Take everything off the model and the Trainer. Harmless when nothing is on."""
        if self._session is not None:
            if isinstance(self._session.phase, Compiled):
                self._compiled_policy = self._session.phase.policy
            self._session.detach()
        self._guard.leave(self)
        self._guard, self._own_logs = Unguarded(None), OwnLogs(None)

    def __repr__(self) -> str:
        return f"AdaccCallback({self.config!r})"
