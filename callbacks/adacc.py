"""AdaccCallback: profile the first steps of a Trainer's run, solve a policy, train under it, keep it in step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adacc_hf.blocks import Checkpointed, Installation
from adacc_hf.callbacks.checkpoint_files import (
    POLICY_FILE,
    PROFILE_FILE,
    load_from_checkpoint,
    save_files,
    save_in_checkpoint,
)
from adacc_hf.callbacks.trainer_guard import TrainerGuard
from adacc_hf.callbacks.training_log import add_to_log, is_training_log
from adacc_hf.config import AdaccConfig
from adacc_hf.executor import PolicyHandle
from adacc_hf.policy import Policy
from adacc_hf.profile import Profile
from adacc_hf.profiler import profile_model
from adacc_hf.ranks import from_first_rank, least_over_ranks, num_ranks
from adacc_hf.rectifier import Rectifier, is_tracking_step
from adacc_hf.solver import solve_policy

log = logging.getLogger(__name__)

__all__ = ["POLICY_FILE", "PROFILE_FILE", "AdaccCallback", "PolicySource"]

PolicySource = Policy | str | Path | Callable[[Profile], Policy]


class AdaccCallback(TrainerCallback):
    """Trains within a memory budget.

    The first `profile_steps` steps run under torch's own checkpointing; then the last batch is profiled, a policy is
    solved and followed. A checkpoint carries its policy and profile, and a run that resumes with the same
    `memory_budget` goes on with them. When training ends, or fails, the model is as it was.

    `policy` overrides the solver: a Policy, a file, or a function of the profile. The rectifier never changes such a
    policy; a Policy or a file is followed from the first step, and goes before a checkpoint's. Fields of `AdaccConfig`
    may be given as keyword arguments instead of a config, or on top of one.

    | logged key | unit |
    |---|---|
    | `adacc/stored_gib` | GiB that the policy keeps for backward, predicted |
    | `adacc/peak_gib` | GiB live at the step's peak, predicted |
    | `adacc/overhead_ms` | milliseconds per micro-batch spent on replay and codecs, predicted |
    | `adacc/compression_rate` | stored bytes over those of plain training |

    Example:
        Trainer(model=model, args=args, train_dataset=dataset, callbacks=[AdaccCallback(memory_budget="20GiB")])
    """

    def __init__(
        self, config: AdaccConfig | None = None, *, policy: PolicySource | None = None, **overrides: Any
    ) -> None:
        self.config = (config or AdaccConfig()).with_overrides(**overrides)
        self.policy: Policy | None = None
        """The policy in force, once it is set."""
        self.profile: Profile | None = None
        self.history: list[dict[str, Any]] = []
        """What happened in the last run: dicts of `step`, `event` ("policy", "tracking", "change") and its figures."""
        self._given = policy
        self._handle: PolicyHandle | None = None
        self._waiting: Installation | None = None
        self._batch: dict[str, Any] | None = None
        self._batch_hook: Any = None
        self._guard: TrainerGuard | None = None
        self._rectifier: Rectifier | None = None
        self._num_steps = 0
        self._policy_step = 0
        self._is_tracking = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.detach()
        _refuse_data_parallel(args)
        self.policy, self.profile, self.history, self._num_steps = None, None, [], 0
        self._guard = TrainerGuard.around_caller(self, on_failure=self.detach)
        try:
            self._begin(args, state, model)
        except BaseException:
            self.detach()
            raise

    def _begin(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        policy = self._known_policy(args, state)
        if policy is not None:
            self._follow(model, policy, state.global_step)
            return
        self._waiting = Installation(model, self.config.block_classes)
        for function in self._waiting.functions.values():
            function.strategy = Checkpointed()
        self._batch_hook = model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._rectifier is None or self._handle is None:
            return
        steps_since = state.global_step + 1 - self._policy_step
        if is_tracking_step(steps_since, self.config.tracking) and self._rectifier.has_work():
            self._rectifier.start_tracking(self._handle)
            self._is_tracking = True

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            self._check_called()
        if self._is_tracking:
            self._rectify(args, state.global_step)
        if self._handle is None and self._num_steps >= self.config.profile_steps:
            self._set_policy(args, state, model, optimizer)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.policy is not None and state.is_world_process_zero:
            save_in_checkpoint(args, state, self.policy, self.profile)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.policy is not None and is_training_log(logs):
            add_to_log(logs, state, self._metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Take everything off the model and the Trainer. Harmless when nothing is on."""
        for attached in (self._handle, self._waiting, self._batch_hook):
            if attached is not None:
                attached.remove()
        if self._guard is not None:
            self._guard.leave(self)
        self._handle = self._waiting = self._batch_hook = self._guard = None
        self._batch = self._rectifier = None
        self._is_tracking = False

    def _known_policy(self, args: TrainingArguments, state: TrainerState) -> Policy | None:
        """The policy that was given, or the one of the checkpoint that training resumes from, with its profile."""
        if isinstance(self._given, Policy):
            return self._given
        if isinstance(self._given, (str, Path)):
            return Policy.load(self._given)
        folder = self._guard.checkpoint if self._guard is not None else args.resume_from_checkpoint
        if folder is None:
            return None
        # The first rank decides, also where the others do not see its files: all ranks must profile, or none.
        found = from_first_rank(lambda: load_from_checkpoint(folder, self.config.memory_budget))
        policy, self.profile = found or (None, None)
        return policy

    def _set_policy(self, args: TrainingArguments, state: TrainerState, model: Any, optimizer: Any) -> None:
        """Profile the last batch, solve, and follow the policy from the next step on."""
        if self._batch is None:
            raise RuntimeError("AdaccCallback saw no training batch: the model was not called in train mode")
        self._waiting.remove()  # the profiler's own functions around the blocks must not stand around these
        self._batch_hook.remove()
        was_training = model.training
        model.train()
        self.profile = profile_model(model, self._batch, self.config, optimizer)
        model.train(was_training)
        self.profile = least_over_ranks(self.profile)
        policy = from_first_rank(self._solve)
        self._waiting = self._batch_hook = self._batch = None
        self._follow(model, policy, state.global_step)
        if state.is_world_process_zero:
            save_files(args.output_dir, policy, self.profile)

    def _solve(self) -> Policy:
        if callable(self._given):
            return self._given(self.profile)
        return solve_policy(self.profile, self.config.memory_budget, self.config)

    def _follow(self, model: Any, policy: Policy, step: int) -> None:
        self._handle = PolicyHandle(model, policy, self.config.block_classes)
        self.policy, self._policy_step = policy, step
        self._rectifier = self._new_rectifier(policy)
        self._note(step, "policy", **self._predictions(policy))
        log.info("Adacc: %s", policy.summary())

    def _new_rectifier(self, policy: Policy) -> Rectifier | None:
        """None where the policy stays as it is: it was given, or each of several ranks would find its own outliers."""
        if self._given is not None or self.profile is None or self.config.tracking == "off":
            return None
        rectifier = Rectifier(self.profile, policy, self.config)
        if num_ranks() == 1:
            return rectifier
        if rectifier.has_work():
            log.warning(
                "Adacc: tracking=%r has no effect with %d ranks: the policy is not changed during the run",
                self.config.tracking,
                num_ranks(),
            )
        return None

    def _rectify(self, args: TrainingArguments, step: int) -> None:
        found = self._rectifier.finish_tracking(self._handle)
        self._is_tracking = False
        self._note(step, "tracking", reason=found.reason, num_outliers=found.num_outliers)
        if found.policy is None:
            return
        self.policy, self.profile = found.policy, self._rectifier.profile
        self._handle.replace(found.policy)
        self._note(step, "change", reason=found.reason, **self._predictions(found.policy))
        log.info("Adacc: policy changed at step %d (%s): %s", step, found.reason, found.policy.summary())
        save_files(args.output_dir, self.policy, self.profile)

    def _check_called(self) -> None:
        """Report blocks whose function was never called: something replaced their forward at class level."""
        installation = self._waiting if self._handle is None else self._handle.installation
        uncalled = installation.uncalled()
        if uncalled:
            raise RuntimeError(
                f"{len(uncalled)} of {len(installation.functions)} blocks, {uncalled[0]} first, never reached Adacc in "
                f"the first step: their class's forward was replaced (a fast-kernel patch?); name their class with "
                f"AdaccConfig(block_classes=...) so that their forward is wrapped instead"
            )

    def _keep_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and kwargs:
            self._batch = dict(kwargs)

    def _predictions(self, policy: Policy) -> dict[str, float]:
        return {
            "stored_bytes": policy.predicted_stored_bytes,
            "peak_bytes": policy.predicted_peak_bytes,
            "overhead_ms": policy.predicted_overhead_ms,
        }

    def _metrics(self) -> dict[str, float]:
        metrics = {
            "adacc/stored_gib": self.policy.predicted_stored_bytes / 2**30,
            "adacc/peak_gib": self.policy.predicted_peak_bytes / 2**30,
            "adacc/overhead_ms": self.policy.predicted_overhead_ms,
        }
        if self.profile is not None:
            rate = self.policy.predicted_stored_bytes / self.profile.plain_stored_bytes
            metrics["adacc/compression_rate"] = rate
        return metrics

    def _note(self, step: int, event: str, **figures: Any) -> None:
        self.history.append({"step": step, "event": event, **figures})

    def __repr__(self) -> str:
        return f"AdaccCallback({self.config!r})"


def _refuse_data_parallel(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: nn.DataParallel calls one block from several threads, which AdaccCallback does not "
            f"support; start the run with `accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES to one device"
        )
