"""AdaccCallback: adapter of AdaccSession for Transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.adapt.policy_checks import ALL_BLOCKS, refuse_uncovered
from adacc_hf.adapt.run_state import PolicySource
from adacc_hf.adapt.session import AdaccSession, SessionAdapter
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.files import POLICY_FILE, PROFILE_FILE
from adacc_hf.artifacts.tables import policy_tables
from adacc_hf.callbacks.batched_steps import BatchedSteps, Step
from adacc_hf.callbacks.preconditions import (
    is_compiled,
    refuse_context_parallel,
    refuse_data_parallel,
    refuse_host_memory,
    refuse_offload,
    refuse_second_callback,
    refuse_second_run,
)
from adacc_hf.callbacks.trainer_guard import TrainerGuard
from adacc_hf.callbacks.trainer_loop import TrainerLoop, is_training_log, run_folder

log = logging.getLogger(__name__)

__all__ = ["POLICY_FILE", "PROFILE_FILE", "AdaccCallback", "PolicySource"]

ADDED_LATE = (
    "AdaccCallback was added while its Trainer trains: pass it in callbacks=[...], or add it before trainer.train()"
)
KEEP_ATTACHED = "call detach() after training only, and let errors of training_step end the run"
REPORT, COMPILED_REPORT = "adacc_hf.reports.report", "adacc_hf.compiler.graph_report"
COMPILED_RUN = "adacc_hf.compiler.compiled_run"
"""Modules of extensions, imported by name when they are needed, because callbacks/ must not import extensions, and
because Inductor is slow to import."""


class AdaccCallback(SessionAdapter, TrainerCallback):
    """Callback that trains within a memory budget.

    The first step runs as under gradient checkpointing, and is profiled while it trains. From the second step on, the
    blocks follow the solved policy, which is adapted to the data. If the first batch cannot be profiled
    (`AdaccConfig.profile_steps` lists the reasons), a later one is. With `torch_compile=True` the decisions are made
    inside the compiled graphs. A checkpoint contains the policies and their state. A resumed run uses the policies that
    fit, if the settings are the same. When training ends or fails, the model is restored.

    `policy` replaces the solver: a Policy, the path of a policy file, or a function that makes a Policy from a Profile.
    A policy that is passed in never changes. A Policy or a file is used from the first step, even if the checkpoint
    contains another policy. Fields of AdaccConfig can also be passed as keyword arguments, which override `config`.

    With `batch_by_bytes`, the samples of each optimizer step stay the same, and are divided into micro-batches that are
    as large as the budget allows. `per_device_train_batch_size` is for the first steps.

    | logged key | unit |
    |---|---|
    | `adacc/stored_gib` | GiB stored for backward, predicted |
    | `adacc/peak_gib` | GiB of live tensors at the step's peak, predicted |
    | `adacc/overhead_ms` | predicted milliseconds of recomputation and codecs per micro-batch |
    | `adacc/fallback_steps` | steps so far in which at least one call of a block did not follow the policy |
    | `adacc/host_gib` | GiB stored in host memory, predicted; only with `host_memory` |
    | `adacc/measured_host_gib` | largest number of GiB in host memory since the last log |
    | `adacc/compression_rate` | stored bytes divided by the stored bytes of plain training |
    | `adacc/measured_peak_gib` | GiB of live tensors at the peak of the last measured step |
    | `adacc/error` | largest relative L2 error of a compressed activation, at the last tracking step |
    | `adacc/gradient_error` | largest relative L2 error of a sampled block's gradient, at the last tracking step |

    For example:

        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[AdaccCallback(memory_budget="20GiB")])
    """

    def __init__(
        self,
        config: AdaccConfig | None = None,
        *,
        policy: PolicySource | None = None,
        batch_by_bytes: bool = False,
        **overrides: Any,
    ) -> None:
        super().__init__(config, policy, overrides)
        self._batches_by_bytes = batch_by_bytes
        self._steps: BatchedSteps | None = None
        """Micro-batches of the current run with `batch_by_bytes`, else None."""
        self._guard: TrainerGuard | None = None
        """Wrappers around the methods of the current run's Trainer. None outside a run."""

    @property
    def compiled_policy(self) -> Any:
        """The `compiler.CompiledPolicy` of a run with `torch_compile=True`, whose attribute `policy` is None."""
        return None if self.session is None else self._session.state.compiled_policy

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        refuse_data_parallel(args)
        refuse_second_run(self, None if self._guard is None else self._guard.trainer)
        self.detach()
        self._guard = guard = TrainerGuard.around_caller(self, on_failure=self.detach)
        trainer = guard.trainer
        guard.wrap("training_step", self._training_step)
        guard.wrap("compute_loss", self._compute_loss)
        guard.wrap("_save_checkpoint", self._save_checkpoint)
        guard.wrap("log", self._log)
        optimizer = kwargs.get("optimizer")
        try:
            loop = TrainerLoop(trainer)
            self._session = AdaccSession(model, optimizer, self.config, policy=self._source, loop=loop)
            refuse_second_callback(self, trainer)
            refuse_context_parallel(trainer)
            self._begin(trainer, self._session, guard.checkpoint)
            if self._batches_by_bytes:
                self._steps = BatchedSteps(trainer, self._session)
                guard.wrap("get_batch_samples", self._steps.get_batch_samples)
        except BaseException:
            self.detach()
            raise

    def _begin(self, trainer: Trainer, session: AdaccSession, checkpoint: str | None) -> None:
        if is_compiled(trainer):
            refuse_host_memory(self.config)
            session.begin_with(import_module(COMPILED_RUN).begin_compiled_run(session.state, checkpoint))
            return
        refuse_offload(trainer.args)
        if checkpoint is None or self._is_policy_given or not session.load(checkpoint):
            session.begin(step=trainer.state.global_step)

    @property
    def _begun(self) -> AdaccSession:
        """The session of the current run. Raises RuntimeError if no run has begun with this callback."""
        if self._session is None:
            raise RuntimeError(ADDED_LATE)
        return self._session

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        if self._begun.is_closed:
            refuse_uncovered(self.config, ALL_BLOCKS, "this callback was detached", KEEP_ATTACHED)
            self._begun.state.warn_once(
                "Adacc: training continues at step %d after this callback was detached: the model trains without a "
                "policy and without memory_budget=%r. To avoid this, %s",
                state.global_step,
                self.config.memory_budget,
                KEEP_ATTACHED,
            )
        if self._steps is None:
            self._begun.state.loop.num_micro = args.gradient_accumulation_steps  # which may change during the run
        self._begun.begin_step(state.global_step, optimizer)

    def _training_step(self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, Step):
            assert self._steps is not None  # which has made it
            return self._steps.train(step, model, inputs, *args, **kwargs)
        return self._begun.train(partial(step, model, inputs, *args, **kwargs), inputs)

    def _compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        phase = self._begun.phase
        if model.training:
            phase.begin_forward(inputs)
        result = compute(model, inputs, *args, **kwargs)
        self._begun.phase.note_loss(result, inputs)
        return result

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._begun.begin_optimizer_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._begun.phase.end_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begun.end_step(state.global_step)

    def _save_checkpoint(self, save: Callable[..., Any], model: Any, trial: Any = None) -> None:
        """Save with each checkpoint. The Trainer sends no event for a checkpoint that is written upon SIGTERM."""
        save(model, trial=trial)
        if self._guard is None:  # detached
            return
        trainer = self._guard.trainer
        checkpoint = Path(run_folder(trainer)) / f"checkpoint-{trainer.state.global_step}"
        if checkpoint.is_dir():
            self._begun.save(checkpoint)
        elif trainer.state.is_world_process_zero:
            log.warning("Adacc: no policy saved, because there is no folder %s; a resumed run solves again", checkpoint)

    def _log(self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the metrics to a log before any callback, such as TensorBoard's, gets it."""
        if is_training_log(logs):
            logs.update(self._begun.phase.figures(logs))
        log(logs, *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._begun.phase.ends()
        finally:
            self.detach()

    def detach(self) -> None:
        """Restore the model and the Trainer. Further calls have no effect."""
        if self.session is not None:
            self._session.detach()
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        if self._guard is not None:
            self._guard.leave(self)
        self._guard = None

    def report(self) -> Any:
        """Return the report of the current or last run, with the same content as the files of `adacc report`.

        A notebook shows the report with its pictures. `print` prints its text, and `report.save(folder)` writes
        report.md and report.html. Raises ValueError if the run has no policy yet, and if the policy was passed in
        without a profile. Raises ImportError without matplotlib.
        """
        if self.policy is None:
            if self.compiled_policy is not None:
                return import_module(COMPILED_REPORT).compiled_report(policy=self.compiled_policy, history=self.history)
            raise ValueError("AdaccCallback has no policy to report yet: call report() after the first training step")
        if self.profile is None:
            raise ValueError(
                "AdaccCallback has a policy that was passed in, and no profile to explain it with: write a report with "
                "`adacc report POLICY --profile PROFILE`, or pass policy as a function, so that the run is profiled"
            )
        return import_module(REPORT).policy_report(profile=self.profile, policy=self.policy, history=self.history)

    def _repr_markdown_(self) -> str:
        """Return the settings and, if there is a policy, a table of its actions, which notebooks show."""
        return f"`{self!r}`: no policy yet" if self.policy is None else policy_tables(repr(self), self.policy)
