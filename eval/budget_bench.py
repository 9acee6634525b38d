"""What a memory budget costs in time: Adacc within it, beside plain training and HF gradient checkpointing.

    python -m adacc_hf.eval.budget_bench

The budgets are fractions of what plain training stores for backward, and the peak of HF gradient checkpointing as an
absolute budget. Each is met twice: with every action, and losslessly (RETAIN and RECOMPUTE, gradients bit-equal).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, InfeasibleBudgetError, Policy, profile_model, solve_policy
from adacc_hf.eval.clock import add_clock, check_clock
from adacc_hf.eval.contenders import (
    CHECKPOINTING,
    PLAIN,
    Contender,
    check_gradients,
    time_rounds,
    timing_figures,
)
from adacc_hf.eval.records import RedGateError, Settings, add_settings, markdown_table, positive_int, save_record
from adacc_hf.eval.workload import DEMO, Batch, Workload
from adacc_hf.memory import StepMemory
from adacc_hf.units import format_bytes

FRACTIONS = (0.5, 0.25)
LOSSLESS = AdaccConfig(actions=("retain", "recompute"))
MODES = {"Adacc": AdaccConfig(), "Adacc lossless": LOSSLESS}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget as it is given to `solve_policy`, and what it comes to."""

    title: str
    given: float | int
    nbytes: int

    @property
    def bounds_peak(self) -> bool:
        """Whether it bounds the peak of the step; a fraction bounds what is stored."""
        return isinstance(self.given, int)

    def holds(self, memory: StepMemory) -> bool:
        return (memory.peak_bytes if self.bounds_peak else memory.stored_bytes) <= self.nbytes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender and the budget that it keeps to; None for plain training and HF gradient checkpointing."""

    contender: Contender
    budget: Budget | None = None


def main(argv: Sequence[str] | None = None, workload: Workload = DEMO) -> int:
    """Measure, print the table and save the record. Returns 1, and saves nothing, on wrong gradients."""
    parser = argparse.ArgumentParser(prog="adacc_hf.eval.budget_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=positive_int, default=15, help="timed rounds")
    add_clock(parser)
    add_settings(parser, "budget_bench")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    try:
        figures, skipped = measure(workload, arguments.rounds, arguments.clock, settings)
    except RedGateError as error:
        print(f"budget_bench: {error}", file=sys.stderr)
        return 1
    options = {"rounds": arguments.rounds, "clock": arguments.clock, "fractions": FRACTIONS}
    save_record(settings, {"workload": asdict(workload), **options}, {"methods": figures, "skipped": skipped})
    lines = [f"{workload} (forward and backward)", "", table_text(figures), ""]
    lines += [f"not measured: {name}: {reason}" for name, reason in skipped.items()]
    print("\n".join([*lines, f"saved as {settings.output}"]))
    return 0


def measure(
    workload: Workload, num_rounds: int, clock: str, settings: Settings
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The figures of every method, and why a budget was left out. Raises RedGateError on wrong gradients."""
    model = workload.model(settings.device, settings.seed)
    batch = next(workload.batches(settings.device, settings.seed))
    base = [Contender(PLAIN, model, batch), Contender(CHECKPOINTING, model, batch)]
    check_gradients(base)
    entries, skipped = within_budgets(model, batch, base[1].memory().peak_bytes)
    entries = [*(Entry(contender=contender) for contender in base), *entries]
    contenders = [entry.contender for entry in entries]
    errors = check_gradients(contenders)
    memory = {contender.name: contender.memory() for contender in contenders}
    figures = timing_figures(time_rounds(contenders, num_rounds, clock))
    for entry in entries:
        name = entry.contender.name
        figures[name] |= _memory_figures(entry, memory[name]) | {"gradient_error": errors[name]}
    return figures, skipped


def within_budgets(
    model: PreTrainedModel, batch: Batch, checkpointing_peak_bytes: int
) -> tuple[list[Entry], dict[str, str]]:
    """A contender for every budget and mode, and the budgets that nothing fits."""
    profile = profile_model(model, batch)
    stored_bytes = profile.plain_stored_bytes
    budgets = [Budget(title=f"{f:.0%} of plain", given=f, nbytes=int(f * stored_bytes)) for f in FRACTIONS]
    peak = Budget(title="checkpointing's peak", given=checkpointing_peak_bytes, nbytes=checkpointing_peak_bytes)
    entries, skipped = [], {}
    for budget in [*budgets, peak]:
        for mode, config in MODES.items():
            name = f"{mode}, {budget.title}"
            try:
                policy = solve_policy(profile, budget.given, config)
            except InfeasibleBudgetError as error:
                skipped[name] = str(error)
                continue
            entries.append(Entry(contender=Contender(name, model, batch, policy), budget=budget))
    return entries, skipped


def _memory_figures(entry: Entry, memory: StepMemory) -> dict[str, Any]:
    figures: dict[str, Any] = {"stored_bytes": memory.stored_bytes, "peak_bytes": memory.peak_bytes}
    if entry.budget is not None:
        policy: Policy = entry.contender.policy
        figures["budget"] = asdict(entry.budget) | {"of": "peak" if entry.budget.bounds_peak else "stored"}
        figures["within_budget"] = entry.budget.holds(memory)
        figures["predicted_stored_bytes"] = policy.predicted_stored_bytes
        figures["predicted_peak_bytes"] = policy.predicted_peak_bytes
        figures["predicted_overhead_ms"] = policy.predicted_overhead_ms
        figures["actions"] = dict(policy.action_counts())
        figures["solve_seconds"] = dict(policy.facts)["seconds"]
    return figures


def table_text(figures: dict[str, dict[str, Any]]) -> str:
    """One line per method; the budget stands beside what it bounds."""
    return markdown_table([_cells(name, row) for name, row in figures.items()])


def _cells(name: str, row: dict[str, Any]) -> dict[str, str]:
    def size(of: str) -> str:
        text = format_bytes(row[f"{of}_bytes"])
        budget = row.get("budget")
        return f"{text} of {format_bytes(budget['nbytes'])}" if budget and budget["of"] == of else text

    checkpointing = row["of_checkpointing_by_round"]
    return {
        "method, budget": name,
        "step, ms": row["step_ms"].text(1),
        "x plain": f"{row['of_plain']:.2f}",
        "x checkpointing": f"{row['of_checkpointing']:.2f} ({checkpointing.low:.2f} to {checkpointing.high:.2f})",
        "stored": size("stored"),
        "peak": size("peak"),
        "fits": {True: "yes", False: "NO", None: ""}[row.get("within_budget")],
        "gradient error": f"{row['gradient_error']:.4f}",
    }


if __name__ == "__main__":
    sys.exit(main())
