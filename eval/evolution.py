"""What policy evolution gains: the frozen first policy against one that follows the data (the paper's Figure 7).

    adacc eval evolution

Two cases at each batch size. "stdlib text": a GPT-2 is trained from scratch on the standard library's text.
"constructed": a GPT-2 with wide MLPs, whose outlier channels are there when the policy is set, vanish, come back, and
vanish again. After training, steps of the first and the last policy are timed in turn on the same model.
The record has beside it a plot of tokens per second and one of outliers over steps (the paper's Figure 4).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Settings, Spread, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.clock import CLOCKS, add_clock, check_clock
from adacc_hf.eval.trials.evolution_case import Case, Change, Outcome
from adacc_hf.eval.trials.evolution_scenarios import SCENARIOS, Scenario
from adacc_hf.eval.trials.workload import Workload

BATCHES = (1, 2, 4, 8)
WORKLOAD = Workload(width=128, layers=4, batch=1, tokens=64)
"""The model of all cases; only the batch differs."""
PAPER = "1.13x to 1.18x on GPT-117M, 1.11x to 1.20x on GPT-345M"


def main(argv: Sequence[str] | None = None, workload: Workload = WORKLOAD) -> int:
    """Measure every case, print the table, save record, table and plots."""
    parser = argparse.ArgumentParser(prog="adacc eval evolution", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive_int, default=136, help="training steps of every case")
    parser.add_argument(
        "--rounds", type=positive_int, default=31, help="least timed rounds of the first and last policies"
    )
    parser.add_argument("--batches", type=positive_int, nargs="+", default=list(BATCHES), help="batch sizes")
    parser.add_argument("--cases", choices=tuple(SCENARIOS), nargs="+", default=list(SCENARIOS), help="what to train")
    parser.add_argument("--budget", type=float, help="fraction of what plain stores (default: each case's own)")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "evolution")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    options = {name: getattr(arguments, name) for name in ("steps", "rounds", "batches", "cases", "budget", "clock")}
    with open_ledger(settings, {"workload": asdict(workload), **options}, arguments.resume) as ledger:
        for batch in tqdm(arguments.batches, desc="evolution", unit="batch size"):
            for name in arguments.cases:
                ledger.measure(_key(name, batch), partial(_run, ledger, name, batch))
        ledger.finish(paper=PAPER)
        save_plots(ledger)
        ledger.publish(report_text(ledger))
    return 0


def report_text(ledger: Ledger) -> str:
    """One line per case as Markdown, and the paper's figures."""
    info = ledger.run_info
    workload = Workload(**info["workload"])
    heading = f"{workload}, {info['steps']} steps"
    outcomes = {name: _outcome(point) for name, point in ledger.points.items()}
    table = markdown_table([_cells(name, outcome) for name, outcome in outcomes.items()])
    shares = [outcome.frozen_overhead_ms / outcome.frozen_step_ms.median for outcome in outcomes.values()]
    budgets = ", ".join(f"{_scenario(name, info['budget']).budget:.1%} ({name})" for name in info["cases"])
    return (
        f"{heading}\n\n{table}\n\nBudgets, of what plain training stores: {budgets}. Evolution can gain no "
        f"more than the overhead of the first policy, here {min(shares):.1%} to {max(shares):.1%} of a step.\n\n"
        f"The paper's Figure 7: {ledger.summary['paper']}.\n"
    )


def save_plots(ledger: Ledger) -> None:
    """Tokens per second against batch size, and outliers over steps, beside the record."""
    info, output = ledger.run_info, ledger.settings.output
    keys = {(name, batch): _key(name, batch) for name in info["cases"] for batch in info["batches"]}
    speeds: dict[str, list[tuple[float, float]]] = {}
    for (name, batch), key in keys.items():
        for policy in ("frozen", "evolving"):
            step_ms = ledger.points[key][f"{policy}_step_ms"]["median"]
            speed = batch * info["workload"]["tokens"] * 1e3 / step_ms
            speeds.setdefault(f"{name}, {policy}", []).append((batch, speed))
    curves(output.with_suffix(".svg"), speeds, "batch size", "tokens/s")
    outliers = {key: [tuple(pair) for pair in ledger.points[key]["outliers"]] for key in keys.values()}
    path = output.with_name(f"{output.stem}_outliers.svg")
    curves(path, outliers, "optimizer step", "outlier channels of all tracked activations")


def predicted_gain(outcome: Outcome) -> float:
    """The gain that the two policies' overheads lead to expect."""
    step_ms = outcome.evolving_step_ms.median
    return (step_ms + outcome.frozen_overhead_ms - outcome.evolving_overhead_ms) / step_ms


def _scenario(name: str, budget: float | None) -> Scenario:
    return SCENARIOS[name] if budget is None else replace(SCENARIOS[name], budget=budget)


def _key(case: str, batch: int) -> str:
    return f"{case}, batch {batch}"


def _run(ledger: Ledger, name: str, batch: int) -> dict[str, Any]:
    info, settings = ledger.run_info, ledger.settings
    workload = Workload(**info["workload"] | {"batch": batch})
    clock = CLOCKS[info["clock"]]
    scenario = _scenario(name, info["budget"])
    case = Case(workload, scenario, info["steps"], clock, settings.device, settings.seed)
    return asdict(case.run(info["rounds"]))


def _outcome(point: dict[str, Any]) -> Outcome:
    spreads = {name: Spread(**point[name]) for name in ("frozen_step_ms", "evolving_step_ms")}
    return Outcome(**{**point, **spreads, "changes": [Change(**change) for change in point["changes"]]})


def _cells(name: str, outcome: Outcome) -> dict[str, str]:
    peaks = [abs(c.measured_peak_bytes / c.predicted_peak_bytes - 1) for c in outcome.changes]
    times = [abs(c.measured_step_ms / c.predicted_step_ms - 1) for c in outcome.changes]
    counts = [count for _, count in outcome.outliers]
    return {
        "case": name,
        "frozen, ms": outcome.frozen_step_ms.text(1),
        "evolving, ms": outcome.evolving_step_ms.text(1),
        "gain": f"{outcome.gain:.3f}x",
        "predicted": f"{predicted_gain(outcome):.3f}x",
        "overhead, predicted ms": f"{outcome.frozen_overhead_ms:.2f} -> {outcome.evolving_overhead_ms:.2f}",
        "stored": f"{format_bytes(outcome.frozen_stored_bytes)} -> {format_bytes(outcome.evolving_stored_bytes)}",
        "outliers": f"{min(counts)} to {max(counts)}" if counts else "-",
        "changes": str(len(outcome.changes)),
        "peak off by": _over(peaks, max),
        "step off by": _over(times, statistics.median),
        "at most": _over(times, max),
    }


def _over(shares: list[float], summary: Callable[[list[float]], float]) -> str:
    """One figure of several shares; a dash if there are none."""
    return f"{summary(shares):.1%}" if shares else "-"


if __name__ == "__main__":
    sys.exit(main())
