"""State and files of one run under a session, and the events that its phases handle (phases.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import going_on, save_files, save_history
from adacc_hf.adapt.events import Event
from adacc_hf.adapt.fallback_stats import STEPS, FallbackStats, num_fallback_steps
from adacc_hf.adapt.optimizer_hooks import OptimizerProbe
from adacc_hf.adapt.policy_builder import PolicySource
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.heads import ComputeLoss

REPORTS_LACK = "training goes on, and reports show what is there"
HISTORY_PARTS = 64
"""The history is written when at least one event in 64 is unwritten: each write is of the whole history."""


class Phase:
    """Handlers of a training loop's events. In this base class they do nothing.

    `step` is always the number of finished steps.
    """

    def step_begins(self, step: int) -> None:
        """Begin a step."""

    def micro_batch_begins(self, inputs: Any) -> None:
        """Begin a micro-batch. If `inputs` is a mapping, it has the micro-batch's tensors; else they come later."""

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which trains on the micro-batch, and return its result."""
        return run()

    def forward_begins(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """Note that `compute_loss`, or the model itself if None, is about to make the loss of `inputs`.

        If not `is_certain`, the loss may turn out to be the model's own, scaled (see `LastBatch`).
        """

    def loss_is_made(self, result: Any, inputs: Any) -> None:
        """Note `result`, the loss or (loss, outputs) of `inputs`, in training or evaluation."""

    def micro_batch_ends(self) -> None:
        """End the micro-batch: record the policy and the fallbacks it ran under."""

    def broken_off(self) -> None:
        """Abandon the step, which an error has ended."""

    def backward_is_over(self) -> None:
        """Handle the end of a step in which the optimizer was not seen to step."""

    def optimizer_begins(self) -> None:
        """Note that the optimizer is about to step."""

    def optimizer_ends(self) -> None:
        """Note that the optimizer has stepped."""

    def step_ends(self, step: int) -> None:
        """End a step."""

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        """Return the figures to add to the training's `logs`. `is_own` is True if all ranks log at this step."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the files that a resumed run needs into `folder`."""

    def ends(self) -> None:
        """End the run: write the last files."""

    def remove(self) -> None:
        """Restore the model and the loop. Harmless when called again."""


class RunState:
    """State of one run of a training loop, shared by all its phases, and the files that describe the run."""

    def __init__(
        self, config: AdaccConfig, source: PolicySource | None, model: nn.Module, optimizer: Any, loop: TrainingLoop
    ) -> None:
        self.config, self.source = config, source
        self.model, self.optimizer, self.loop = model, optimizer, loop
        self.phase = Phase()
        self.policy: Policy | None = None
        self.profile: Profile | None = None
        self.history: list[dict[str, Any]] = []
        self.stats = FallbackStats()
        self.num_before = 0
        """Finished steps of the run that this one resumes; 0 for a new run."""
        self.num_steps = 0
        """Finished steps of this run, without `num_before`."""
        self.has_stepped = False
        """True if the optimizer has begun to update the weights in the current step."""
        self._num_saved = 0
        """Events of the history that are already written."""
        self._is_unsaved = False
        """True if the current policy is not written yet."""
        self._is_uncounted = False
        """True if fallback steps were added to the history's events since the history was written."""

    @property
    def step(self) -> int:
        """Number of finished steps, including those of the run that this one resumes."""
        return self.num_before + self.num_steps

    @property
    def active_policy(self) -> Policy:
        """The current policy. Only for phases that follow a policy."""
        assert self.policy is not None
        return self.policy

    def note(self, event: Event) -> None:
        """Append `event` to the history."""
        self.history.append(event.to_record())

    def show(self, policy: Policy, profile: Profile | None) -> None:
        """Set the policy that is followed from now on, and the profile it was solved for."""
        self.policy, self.profile = policy, profile

    def watch_optimizer(self, watch: OptimizerProbe) -> None:
        """Begin to measure clipping and the optimizer's step, if none was measured and this is not an early step.

        Early steps (before the last of `profile_steps`) are left out: the first one allocates the optimizer's state.
        """
        if not watch.has_seen and self.num_steps >= self.config.profile_steps - 1:
            watch.begin(self.loop.clips, self.model)

    def count_step(self, step: int) -> None:
        """Count the finished `step` as a fallback step if part of it did not follow the policy."""
        self._is_uncounted |= self.stats.step_ends(step, self.history)

    def fallback_figures(self) -> dict[str, float]:
        """Return the number of fallback steps, for the log."""
        return {f"adacc/{STEPS}": num_fallback_steps(self.history)}

    def save(self, changed: bool, is_last: bool = False) -> None:
        """Write the policy, if it changed, and the history into the run's folder.

        A long history is written less often (HISTORY_PARTS).
        """
        folder = self.loop.folder
        if folder is None or not self.loop.is_first_rank:
            return
        self._is_unsaved |= changed
        with going_on(folder, REPORTS_LACK):
            if self._is_unsaved:
                save_files(folder, self.active_policy, self.profile)
                self._is_unsaved = False
            if changed or is_last or (len(self.history) - self._num_saved) * HISTORY_PARTS >= len(self.history):
                save_history(folder, self.history)
                self._num_saved, self._is_uncounted = len(self.history), False

    def save_rest(self) -> None:
        """Write the events that `save` has not written yet."""
        if self._num_saved < len(self.history) or self._is_uncounted:
            self.save(self._is_unsaved, is_last=True)

    def save_by(self, write: Callable[[str | Path, list[dict[str, Any]]], None]) -> None:
        """Call `write(folder, history)`, which writes the files of a compiled run into the run's folder."""
        folder = self.loop.folder
        if folder is not None and self.loop.is_first_rank:
            with going_on(folder, REPORTS_LACK):
                write(folder, self.history)
