"""RunState: state and files of one training run. Phase: base class of the phases, which handle the run's events."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import save_files, save_history
from adacc_hf.adapt.corrections import Corrections
from adacc_hf.adapt.history import FALLBACK, STEPS, fallback_reasons
from adacc_hf.adapt.oom_retry import memory_reported, memory_table
from adacc_hf.adapt.run_profiler import RunProfiler, TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import describe_value
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.distributed import is_first_rank

log = logging.getLogger(__name__)

PolicySource = Policy | str | Path | Callable[[Profile], Policy]

STATE_STEPS = 8
"""Number of steps in which an optimizer with state may create more, or with several ranks any. In fp16, GradScaler
skips the first updates."""
UNWRITTEN = (
    "Adacc: some files could not be written into %s (%s), and training continues. Reports may be incomplete, and a run "
    "that resumes from there solves again: free space on the disk, or choose a folder that can be written"
)


class Phase:
    """Phase of a run: handlers of the training loop's events. The handlers of this base class only end recordings.

    `step` is always the number of finished steps.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run

    def begin_step(self, step: int) -> None:
        """Begin a training step (one optimizer step)."""

    def begin_micro_batch(self, inputs: Any) -> None:
        """Begin a micro-batch. `inputs` is a mapping with its tensors, or None if `begin_forward` gets them later."""

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which trains on the micro-batch, and return its result. If memory runs out, log a table."""
        with memory_reported(self._run.memory_report):
            return run()

    def begin_forward(self, inputs: Any) -> None:
        """Handle the start of a forward on `inputs` in training. A micro-batch may have several."""

    def note_loss(self, result: Any, inputs: Any) -> None:
        """Handle the end of a forward in training or evaluation. `result` is the loss, or (loss, outputs)."""
        if self._run.profiler.live is not None:
            self._run.profiler.end_forward(result[0] if isinstance(result, tuple) and result else result)

    def end_micro_batch(self) -> None:
        """End the micro-batch, and record its fallbacks."""

    def abandon_step(self) -> None:
        """Stop the measurements of a step that an error has ended."""
        self._run.profiler.remove()

    def end_backward(self) -> None:
        """End the measurement of a step's memory: before the optimizer's step, or at the end of a step without one."""
        if self._run.profiler.live is not None:
            self._run.profiler.end_backward()

    def begin_optimizer_step(self) -> None:
        """Handle the start of the optimizer's step."""
        self.end_backward()

    def end_optimizer_step(self) -> None:
        """Handle the end of the optimizer's step."""

    def end_step(self, step: int) -> None:
        """End a step. A policy may be set or replaced."""

    def figures(self, logs: dict[str, float]) -> dict[str, float]:
        """Return the metrics to add to the loop's own metrics `logs`."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the files from which a run can resume into the checkpoint `folder`."""

    def ends(self) -> None:
        """End the run. Write the files that are not written yet, and log a summary."""

    def remove(self) -> None:
        """Remove all wrappers and hooks of this phase from the model. Further calls have no effect."""


class RunState:
    """State of one training run, shared by the run's phases, and writer of the files that describe the run."""

    def __init__(
        self, config: AdaccConfig, source: PolicySource | None, model: nn.Module, optimizer: Any, loop: TrainingLoop
    ) -> None:
        self.config, self.source = config, source
        self.model, self.optimizer, self.loop = model, optimizer, loop
        self.phase = Phase(self)
        self.policy: Policy | None = None
        self.profile: Profile | None = None
        self.compiled_policy: Any = None
        """The `compiler.CompiledPolicy` of a run with torch.compile, which has no `policy`."""
        self.history: list[dict[str, Any]] = []
        self.fallbacks: Counter[str] = Counter()
        """Block calls of the current step that did not follow their plans, by reason."""
        self.corrections = Corrections(config)
        """What the run has learned about memory, codecs and its budget."""
        self.profiler = RunProfiler(config, loop, optimizer)
        self.byte_batches: Any = None
        """The run's `ByteBatches`, if it divides steps into micro-batches by bytes."""
        self.saved_batches: dict[str, Any] | None = None
        """State of the `ByteBatches` of the checkpoint that this run resumes from, or None."""
        self.size_predictor: Profile | None = None
        """A recorded profile that predicts batches of other sizes. None before enough sizes were recorded."""
        self.num_before = 0
        """Number of finished steps before the checkpoint that this run resumes from, or 0 for a new run."""
        self.num_steps = 0
        """Number of finished steps of this run, without `num_before`."""
        self.current_step = 0
        """Number of the current step, counted from 1."""
        self.num_restarts = 0
        """Number of times that the run began again with its warm-up."""
        self.has_stepped = False
        """True if the optimizer has begun to update the weights in the current step."""
        self.num_without_state = STATE_STEPS
        """Number of further steps after which an optimizer may create its state."""
        self._warned: set[Hashable] = set()

    def memory_report(self) -> str:
        """Return a table of the device's memory for the log, after memory ran out. Call this while the tensors of the
        failed step are alive. An error is returned as text, because it would hide the out-of-memory error."""
        try:
            return memory_table(self.model, self.optimizer, self.policy, self.profile)
        except Exception as error:
            return f"Adacc: no table of the device's memory: {error!r}"

    @property
    def step(self) -> int:
        """Number of finished steps, including the steps before the checkpoint that this run resumes from."""
        return self.num_before + self.num_steps

    @property
    def active_policy(self) -> Policy:
        """The current policy. Use this only in phases with a policy. The property fails if `policy` is None."""
        assert self.policy is not None
        return self.policy

    def warn_once(self, text: str, *details: Any) -> None:
        """Log a warning, unless the same `text` was logged earlier in this run. `text` is a %-format for `details`."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *details)

    def note(self, event: str, **figures: Any) -> None:
        """Append an event of the current step to the history, with the figures that are not None."""
        known = {name: figure for name, figure in figures.items() if figure is not None}
        self.history.append({"step": self.current_step, "event": event, **known})

    def warn_of_memory(self, text: str, key: Hashable = None) -> None:
        """Log the warning `text`, and append it to the history. With a `key`, do so once in the run for this key."""
        if key is None or key not in self._warned:
            self._warned.add(key)
            log.warning("Adacc: %s", text)
            self.note("memory", reason=text)

    def budget(self, profile: Profile) -> Budget:
        """Return the run's budget in bytes for policies of `profile`."""
        return Budget.resolve(self.corrections.memory_budget, profile, self.config)

    def count_step(self) -> None:
        """Count the finished step as a fallback step, because some block calls did not follow the policy."""
        ((reason, _),) = self.fallbacks.most_common(1)
        self.fallbacks.clear()
        for record in self.history:
            if record["event"] == FALLBACK and record["reason"] == reason:
                record[STEPS] += 1
                return
        self.note(FALLBACK, reason=reason, **{STEPS: 1})

    def fallback_figures(self) -> dict[str, float]:
        """Return a dict with one metric for the log: the number of fallback steps so far."""
        return {f"adacc/{STEPS}": sum(fallback_reasons(self.history).values())}

    def save(self) -> None:
        """Write policy, profile and history into the run's folder: when a policy changes, with each checkpoint, and at
        the end of the run."""
        self.write(save_files, self.active_policy, self.profile)
        self.write(save_history, self.history)

    @contextmanager
    def warning_of_write_errors(self, folder: str | Path) -> Iterator[None]:
        """Log a warning, once in the run, instead of raising an OSError in the `with` block."""
        try:
            yield
        except OSError as error:
            self.warn_once(UNWRITTEN, folder, error)

    def write(self, write: Callable[..., None], *content: Any) -> None:
        """Call `write(folder, *content)` with the run's folder on the first rank."""
        folder = self.loop.folder
        if folder is not None and is_first_rank():
            with self.warning_of_write_errors(folder):
                write(folder, *content)


def check_called(installation: Installation, executed: ExecutedBlocks | None = None) -> None:
    """Raise RuntimeError if no wrapper of a block was called in the first step. `executed` are the blocks that ran."""
    uncalled = installation.uncalled()
    if len(uncalled) == len(installation.blocks):
        raise RuntimeError(describe_uncalled(installation, uncalled, "in the first step", executed))


def checked_config(owner: str, config: Any, policy: Any, overrides: dict[str, Any]) -> AdaccConfig:
    """Return `config` with some fields replaced by `overrides`. A `config` of None means the defaults.

    Raises TypeError, whose message names the class `owner`, if `config` is not an AdaccConfig, or if `policy` is not a
    Policy, path or function.
    """
    if config is not None and not isinstance(config, AdaccConfig):
        by_name = "**settings" if isinstance(config, Mapping) else "memory_budget=0.5"
        raise TypeError(
            f"config={config!r} is not an AdaccConfig: give settings by name, as in {owner}(..., {by_name}), or pass "
            f"AdaccConfig({by_name})"
        )
    if policy is not None and not isinstance(policy, (str, Path, Policy)) and not callable(policy):
        raise TypeError(
            f"{describe_value('policy', policy)}: give a Policy, the path of a file that Policy.save wrote, or a "
            f"function that makes a Policy of a Profile"
        )
    return (config or AdaccConfig()).with_overrides(**overrides)
