"""One run under a session: what it has come to and the files that tell of it, and the verbs of a phase of it, each of
which has its own answers (phases.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import going_on, save_files, save_history
from adacc_hf.adapt.optimizer_watch import OptimizerWatch
from adacc_hf.adapt.policy_maker import PolicySource
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.adapt.what_ran import STEPS, WhatRan, num_fallback_steps
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.whole_model import ComputeLoss

REPORTS_LACK = "training goes on, and reports show what is there"
HISTORY_PARTS = 64
"""The part of a run's history that may be unwritten for a while: one event in 64."""


class Phase:
    """What a run does at the events of a training loop. This one does nothing.

    `step` is the number of steps that are over.
    """

    def step_begins(self, step: int) -> None:
        """A step begins."""

    def micro_batch_begins(self, inputs: Any) -> None:
        """A micro-batch begins; of `inputs` its tensors are known, if they are a mapping."""

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, which trains on the micro-batch."""
        return run()

    def forward_begins(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """The loss of a micro-batch is about to be made of `inputs`, by `compute_loss`; None for the model itself.

        Unless `is_certain`, the model's own loss may turn out to be what is trained on.
        """

    def loss_is_made(self, result: Any, inputs: Any) -> None:
        """The loss, or (loss, outputs), of `inputs` is made, for training or evaluation."""

    def micro_batch_ends(self) -> None:
        """The micro-batch is over: note what it ran under."""

    def broken_off(self) -> None:
        """An error has ended the step."""

    def optimizer_begins(self) -> None:
        """The optimizer is about to step."""

    def optimizer_ends(self) -> None:
        """The optimizer has stepped."""

    def step_ends(self, step: int) -> None:
        """A step is over."""

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        """What is added to `logs` of training; `is_own` says whether all ranks make them."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what a run that resumes needs into `folder`."""

    def ends(self) -> None:
        """The run is over: write what is left to write."""

    def remove(self) -> None:
        """Take everything off the model and the loop. Harmless when called again."""


class Run:
    """One run of a training loop: what all its phases share, what it has come to, and the files that tell of it."""

    def __init__(
        self, config: AdaccConfig, given: PolicySource | None, model: nn.Module, optimizer: Any, loop: TrainingLoop
    ) -> None:
        self.config, self.given = config, given
        self.model, self.optimizer, self.loop = model, optimizer, loop
        self.phase = Phase()
        self.policy: Policy | None = None
        self.profile: Profile | None = None
        self.history: list[dict[str, Any]] = []
        self.ran = WhatRan()
        self.num_before = 0
        """Steps of an earlier run that this one goes on with."""
        self.num_steps = 0
        """Steps that are over, without those."""
        self.has_stepped = False
        """Whether the optimizer has begun the step's update."""
        self._num_saved = 0
        """Events of the history that are written."""
        self._is_unsaved = False
        """Whether the policy in force is not."""
        self._is_uncounted = False
        """Whether steps were counted in the history since it was written."""

    @property
    def step(self) -> int:
        """The number of steps that are over."""
        return self.num_before + self.num_steps

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

    def watch_optimizer(self, watch: OptimizerWatch) -> None:
        """Look at what clipping and the optimizer take at this step's end, if it is late enough and none was seen."""
        if not watch.has_seen and self.num_steps >= self.config.profile_steps - 1:
            watch.begin(self.loop.clips, self.model)

    def count_step(self, step: int) -> None:
        """Count `step`, which is over, if it ran otherwise than the policy says."""
        self._is_uncounted |= self.ran.step_ends(step, self.history)

    def fallback_figures(self) -> dict[str, float]:
        """How many steps ran otherwise than the policy says, for the log."""
        return {f"adacc/{STEPS}": num_fallback_steps(self.history)}

    def save(self, changed: bool, is_last: bool = False) -> None:
        """Write the policy if it changed, and what happened, into the run's folder.

        Of a long history only every so many events: all of it is written each time.
        """
        folder = self.loop.folder
        if folder is None or not self.loop.is_first_rank:
            return
        self._is_unsaved |= changed
        with going_on(folder, REPORTS_LACK):
            if self._is_unsaved:
                save_files(folder, self.in_force, self.profile)
                self._is_unsaved = False
            if changed or is_last or (len(self.history) - self._num_saved) * HISTORY_PARTS >= len(self.history):
                save_history(folder, self.history)
                self._num_saved, self._is_uncounted = len(self.history), False

    def save_rest(self) -> None:
        """Write what `save` has left out so far."""
        if self._num_saved < len(self.history) or self._is_uncounted:
            self.save(self._is_unsaved, is_last=True)

    def save_by(self, write: Callable[[str | Path, list[dict[str, Any]]], None]) -> None:
        """Have `write` put what happened into the run's folder, with the policy of a kind of its own."""
        folder = self.loop.folder
        if folder is not None and self.loop.is_first_rank:
            with going_on(folder, REPORTS_LACK):
                write(folder, self.history)
