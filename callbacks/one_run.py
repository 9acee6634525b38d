"""One run under AdaccCallback: what it has come to and the files that tell of it, what it trains on, and the verbs of a
phase of it, each of which has its own answers (phases.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments

from adacc_hf.adapt.checkpoint_files import (
    going_on,
    output_folder,
    save_files,
    save_history,
)
from adacc_hf.adapt.what_ran import STEPS, WhatRan, num_fallback_steps
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.callbacks.policy_maker import PolicySource
from adacc_hf.callbacks.trainer import LastBatch, OptimizerWatch
from adacc_hf.price.whole_model import ComputeLoss
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes

REPORTS_LACK = "training goes on, and reports show what is there"
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
