"""The phase of a run that compiles its model: decisions are made inside the compiled graphs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from adacc_hf.adapt.fallback_stats import UNCOMPILED
from adacc_hf.adapt.run_state import Phase, RunState

COMPILED_RUN = "adacc_hf.compiler.compiled_run"
"""What runs with `torch_compile=True` go by. It stands above the callbacks, and Inductor is slow to import: it is found
by its name when such a run begins."""


class Compiled(Phase):
    """Compiled graphs, cut within the budget (compiler/compiled_run.py)."""

    def __init__(self, run: RunState, checkpoint: str | Path | None) -> None:
        self._run = run
        begin = import_module(COMPILED_RUN).begin_compiled_run
        self._compiled, run.history = begin(run.config, run.model, self._note, run.source, checkpoint)

    def _note(self, step: int, event: str, **figures: Any) -> None:
        """Append an event of the compiled run to the history."""
        self._run.history.append({"step": step, "event": event, **figures})

    @property
    def policy(self) -> Any:
        """The `compiler.CompiledPolicy` so far."""
        return self._compiled.policy

    def step_begins(self, step: int) -> None:
        self._compiled.step_begins(self._run.model, self._run.optimizer)

    def loss_is_made(self, result: Any, inputs: Any) -> None:
        self._compiled.loss_is_made(result, inputs)

    def step_ends(self, step: int) -> None:
        num_events = len(self._run.history)
        self._compiled.step_ends(step, self._run.model)
        if self._compiled.fell_back:
            self._run.stats.add(0.0, {UNCOMPILED: 1})
            self._run.count_step(step)
        if len(self._run.history) > num_events:
            self._run.save_by(self._compiled.save)

    def figures(self, logs: dict[str, float], is_own: bool) -> dict[str, float]:
        return self._compiled.metrics() | self._run.fallback_figures()

    def save(self, folder: Path) -> None:
        if folder.is_dir():
            self._compiled.save(folder, self._run.history)

    def remove(self) -> None:
        self._compiled.remove()
