"""`CompiledPhase`: phase of a Trainer's run with `torch_compile=True`. Its policies are for compiled graphs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from adacc_hf.adapt.history import UNCOMPILED
from adacc_hf.adapt.policy_checks import ALL_BLOCKS, refuse_uncovered
from adacc_hf.adapt.run_state import Phase, RunState

NO_NESTED_REGIONS = "leave torch.utils.checkpoint and nested compiled regions out of the model"
FEWER_SIZES = "raise torch._dynamo.config.recompile_limit, or train with fewer different batch sizes"
COMPILED_RUN = "adacc_hf.compiler.compiled_run"
"""Module with the policies of compiled graphs. It is imported by name when a run with torch.compile begins, because
callbacks/ must not import compiler/, and because Inductor is slow to import."""


class CompiledPhase(Phase):
    """Phase of training with compiled graphs, whose stored bytes stay within the budget (compiler/compiled_run.py)."""

    def __init__(self, run: RunState, checkpoint: str | Path | None) -> None:
        self._run = run
        begin = import_module(COMPILED_RUN).begin_compiled_run

        def note(step: int, event: str, **figures: Any) -> None:
            """Append an event to the history. The function refers to `run` and not to `self`, to avoid a reference
            cycle: the phase keeps this function alive."""
            run.history.append({"step": step, "event": event, **figures})

        self._compiled, run.history = begin(run.config, run.model, note, run.source, checkpoint)

    @property
    def policy(self) -> Any:
        """The current `compiler.CompiledPolicy`."""
        return self._compiled.policy

    def begin_step(self, step: int) -> None:
        self._compiled.begin_step(self._run.model, self._run.optimizer)

    def note_loss(self, result: Any, inputs: Any) -> None:
        self._compiled.note_loss(result, inputs)
        if self._compiled.fell_back:
            refuse_uncovered(self._run.config, ALL_BLOCKS, UNCOMPILED, FEWER_SIZES)

    def end_step(self, step: int) -> None:
        num_events = len(self._run.history)
        self._compiled.end_step(step, self._run.model)
        for refusal in self._compiled.refusals:
            refuse_uncovered(self._run.config, "a compiled region", refusal, NO_NESTED_REGIONS)
        if self._compiled.fell_back:
            self._run.fallbacks[UNCOMPILED] += 1
            self._run.count_step()
        if len(self._run.history) > num_events:
            self._run.write(self._compiled.save, self._run.history)

    def figures(self, logs: dict[str, float]) -> dict[str, float]:
        return self._compiled.metrics() | self._run.fallback_figures()

    def save(self, folder: Path) -> None:
        if folder.is_dir():
            self._compiled.save(folder, self._run.history)

    def remove(self) -> None:
        self._compiled.remove()
