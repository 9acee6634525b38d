"""What a memory budget costs in time: Adacc within it, beside plain training and HF gradient checkpointing.

    adacc eval budget-bench

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

from adacc_hf import AdaccConfig, InfeasibleBudgetError, profile_model, solve_policy
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import RedGateError, Settings, Spread, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.clock import add_clock, check_clock
from adacc_hf.eval.trials.contenders import (
    CHECKPOINTING,
    PLAIN,
    Contender,
    check_gradients,
    time_rounds,
    timing_figures,
)
from adacc_hf.eval.trials.workload import DEMO, Batch, Workload
from adacc_hf.torch_glue.memory import StepMemory

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
    parser = argparse.ArgumentParser(prog="adacc eval budget-bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=positive_int, default=15, help="timed rounds")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "budget_bench")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    options = {"rounds": arguments.rounds, "clock": arguments.clock, "fractions": FRACTIONS}
    with open_ledger(settings, {"workload": asdict(workload), **options}, arguments.resume) as ledger:
        try:
            ledger.measure(str(workload), lambda: measure(workload, arguments.rounds, arguments.clock, settings))
        except RedGateError as error:
            print(f"adacc eval budget-bench: {error}", file=sys.stderr)
            return 1
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0


def measure(workload: Workload, num_rounds: int, clock: str, settings: Settings) -> dict[str, dict[str, Any]]:
    """The figures of every "methods", and why a budget was "skipped". Raises RedGateError on wrong gradients.

    One point for all: they are timed in turn, which no part of it could repeat.
    """
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
    return {"methods": figures, "skipped": skipped}


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
    policy = entry.contender.policy
    if entry.budget is not None and policy is not None:
        figures["budget"] = asdict(entry.budget) | {"of": "peak" if entry.budget.bounds_peak else "stored"}
        figures["within_budget"] = entry.budget.holds(memory)
        figures["predicted_stored_bytes"] = policy.predicted_stored_bytes
        figures["predicted_peak_bytes"] = policy.predicted_peak_bytes
        figures["predicted_overhead_ms"] = policy.predicted_overhead_ms
        figures["actions"] = dict(policy.action_counts())
        figures["solve_seconds"] = dict(policy.facts)["seconds"]
    return figures


def report_text(ledger: Ledger) -> str:
    """One line per method as Markdown, the budget beside what it bounds; and the budgets that nothing fits."""
    parts = []
    for workload, point in ledger.points.items():
        parts += [f"{workload} (forward and backward)"]
        parts += [markdown_table([_cells(name, row) for name, row in point["methods"].items()])]
        parts += [f"not measured: {name}: {reason}" for name, reason in point["skipped"].items()]
    return "\n\n".join(parts) + "\n"


def _cells(name: str, row: dict[str, Any]) -> dict[str, str]:
    def size(of: str) -> str:
        text = format_bytes(row[f"{of}_bytes"])
        budget = row.get("budget")
        return f"{text} of {format_bytes(budget['nbytes'])}" if budget and budget["of"] == of else text

    checkpointing = Spread(**row["of_checkpointing_by_round"])
    return {
        "method, budget": name,
        "step, ms": Spread(**row["step_ms"]).text(1),
        "x plain": f"{row['of_plain']:.2f}",
        "x checkpointing": f"{row['of_checkpointing']:.2f} ({checkpointing.low:.2f} to {checkpointing.high:.2f})",
        "stored": size("stored"),
        "peak": size("peak"),
        "fits": {True: "yes", False: "NO", None: ""}[row.get("within_budget")],
        "gradient error": f"{row['gradient_error']:.4f}",
    }


if __name__ == "__main__":
    sys.exit(main())
