"""State and files of one run under a session, and the events that its phases handle (phases.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import save_files, save_history, warn_on_write_error
from adacc_hf.adapt.events import Event
from adacc_hf.adapt.fallback_stats import STEPS, FallbackStats, num_fallback_steps
from adacc_hf.adapt.memory_table import LiveMemory, memory_table
from adacc_hf.adapt.micro_batches import MicroBatches
from adacc_hf.adapt.policy_builder import PolicySource
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.run.blocks import Installation

log = logging.getLogger(__name__)

REPORTS_LACK = "training goes on, and reports show what is there"
HISTORY_PARTS = 64
"""The history is saved if at least one event in 64 is not saved yet, because each save writes the whole history."""


class Phase:
    """Handlers of a training loop's events. In this base class they do nothing.

    `step` is always the number of finished steps.
    """

    def begin_step(self, step: int) -> None:
        """Begin a step."""

    def begin_micro_batch(self, inputs: Any) -> None:
        """Begin a micro-batch. If `inputs` is a mapping, it has the micro-batch's tensors; else they come later."""

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which trains on the micro-batch, and return its result."""
        return run()

    def tighten(self) -> str | None:
        """Follow a policy with less memory after the step ran out of memory, or return why that is impossible."""
        return "no policy that can change was active"

    def advice(self) -> str:
        """Return advice on the settings with which a step fits in memory."""
        return "Use a smaller batch or shorter sequences"

    def begin_forward(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        """Handle the start of a forward on `inputs`, whose loss `compute_loss` computes, or the model itself if None.

        If `is_certain` is False, the loss may turn out to be the model's own loss, scaled (see `LastBatch`).
        """

    def note_loss(self, result: Any, inputs: Any) -> None:
        """Handle the end of a forward on `inputs` in training or evaluation.

        `result` is the loss, or (loss, outputs).
        """

    def end_micro_batch(self) -> None:
        """End the micro-batch: record the policy and the fallbacks it ran under."""

    def abandon_step(self) -> None:
        """Abandon the step, which an error has ended."""

    def end_backward(self) -> None:
        """Handle the end of a step in which no optimizer step was observed."""

    def begin_optimizer_step(self) -> None:
        """Handle the start of the optimizer's step."""

    def end_optimizer_step(self) -> None:
        """Handle the end of the optimizer's step."""

    def end_step(self, step: int) -> None:
        """End a step."""

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        """Return the metrics to add to `logs`, the training loop's metrics at the current step.

        `is_on_all_ranks` is True if all ranks log at this step.
        """
        return {}

    def save(self, folder: Path) -> None:
        """Write the files that a resumed run needs into `folder`."""

    def ends(self) -> None:
        """End the run: write the last files."""

    def remove(self) -> None:
        """Restore the model and the loop. Further calls have no effect."""


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
        self.batches = MicroBatches()
        self.profiler = RunProfiler(config, loop)
        self.profiler.inner_steps.expected = optimizer
        self.num_before = 0
        """Finished steps of the run that this one resumes; 0 for a new run."""
        self.num_steps = 0
        """Finished steps of this run, without `num_before`."""
        self.has_stepped = False
        """True if the optimizer has begun to update the weights in the current step."""
        self._warned: set[str] = set()
        self._num_saved = 0
        """Number of the history's events that are saved already."""
        self._is_unsaved = False
        """True if the current policy is not saved yet."""
        self._is_uncounted = False
        """True if fallback steps were added to the history's events since the history was last saved."""

    def memory_report(self) -> str:
        """Return a table of the device's memory. Call this while the tensors of the failed step are alive."""
        return memory_table(LiveMemory.measure(self.model, self.optimizer), self.policy, self.profile)

    @property
    def step(self) -> int:
        """Number of finished steps, including those of the run that this one resumes."""
        return self.num_before + self.num_steps

    @property
    def active_policy(self) -> Policy:
        """The current policy. Only for phases that follow a policy."""
        assert self.policy is not None
        return self.policy

    def warn_once(self, text: str, *details: Any) -> None:
        """Warn, once in the run for each text."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *details)

    def note(self, event: Event) -> None:
        """Append `event` to the history."""
        self.history.append(event.to_record())

    def show(self, policy: Policy, profile: Profile | None) -> None:
        """Set the policy that is followed from now on, and the profile it was solved for."""
        self.policy, self.profile = policy, profile

    def watch_optimizer(self) -> None:
        """Begin to measure the memory of clipping and of the optimizer's step, unless a step was measured before.

        Steps before step number `profile_steps` are not measured, because the first one allocates the optimizer's
        state.
        """
        if not self.profiler.optimizer.has_seen and self.num_steps >= self.config.profile_steps - 1:
            self.profiler.optimizer.begin(self.loop.clips, self.model)

    def count_step(self, step: int) -> None:
        """Count the finished `step` as a fallback step if part of it did not follow the policy."""
        self._is_uncounted |= self.stats.end_step(step, self.history)

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
        with warn_on_write_error(folder, REPORTS_LACK):
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
            with warn_on_write_error(folder, REPORTS_LACK):
                write(folder, self.history)


def check_called(installation: Installation) -> None:
    """Raise RuntimeError if no block's wrapper was called: another package has replaced the class's forward."""
    uncalled = installation.uncalled()
    if len(uncalled) == len(installation.blocks):
        raise RuntimeError(
            f"{len(uncalled)} of {len(installation.blocks)} blocks, {uncalled[0]} first, never reached Adacc in "
            f"the first step: their class's forward was replaced (a fast-kernel patch?); name their class with "
            f"AdaccConfig(block_classes=...) so that their forward is wrapped instead"
        )
