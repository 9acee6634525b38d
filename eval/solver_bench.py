"""How long the policy maker takes, over budgets, for GPT-2 with fused and with eager attention (paper: below 0.5 s).

    adacc eval solver

The models are narrow, which changes prices but not the size of the problem. A budget that nothing fits is timed until
it is refused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf import InfeasibleBudgetError, Policy, profile_model, solve_policy
from adacc_hf.eval.clock import CLOCKS, add_clock, check_clock
from adacc_hf.eval.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records import Settings, add_settings, markdown_table, positive_int
from adacc_hf.eval.workload import Workload
from adacc_hf.policy import Action
from adacc_hf.profile import Profile

CASES = tuple(
    # 256 KiB and more for most activations, so that they are large enough to be compressed.
    Workload(width=64, layers=layers, batch=8, tokens=128, attention=attention)
    for attention in ("sdpa", "eager")
    for layers in (12, 48)
)
Solver = Callable[[Profile, float | int], tuple[list[float], bool]]

PAPER_SECONDS = 0.5
LEAST_PERCENT = 5


def main(argv: Sequence[str] | None = None, cases: Sequence[Workload] = CASES) -> int:
    """Time every case, print the table and save the record."""
    parser = argparse.ArgumentParser(prog="adacc eval solver", description=__doc__.partition("\n")[0])
    parser.add_argument("--step", type=positive_int, default=5, help="distance of the budgets, in percent")
    parser.add_argument(
        "--repeats", type=positive_int, default=3, help="solves of each budget, of which the median counts"
    )
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "solver")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    percents = range(LEAST_PERCENT, 101, arguments.step)
    solver = partial(solve_seconds, repeats=arguments.repeats, now=CLOCKS[arguments.clock])
    options = {"percents": list(percents), "repeats": arguments.repeats, "clock": arguments.clock}
    with open_ledger(settings, {"cases": [asdict(case) for case in cases], **options}, arguments.resume) as ledger:
        for workload in cases:
            ledger.measure(case_name(workload), partial(measure, workload, percents, solver, settings))
        ledger.finish(paper_seconds=PAPER_SECONDS)
        ledger.publish(report_text(ledger))
    return 0


def case_name(workload: Workload) -> str:
    return f"{workload.attention}, {workload.layers} blocks"


def measure(workload: Workload, percents: Sequence[int], solver: Solver, settings: Settings) -> dict[str, Any]:
    """Solve times of one model: over budgets on what is "stored", and over budgets on the "peak"."""
    model = workload.model(settings.device, settings.seed)
    profile = profile_model(model, next(workload.batches(settings.device, settings.seed)))
    plain = Policy.uniform(profile, Action.RETAIN)
    budgets = {
        "stored": {percent: percent / 100 for percent in percents},
        "peak": {percent: plain.predicted_peak_bytes * percent // 100 for percent in percents},
    }
    figures = {}
    for of, given in budgets.items():
        label = f"{case_name(workload)}, {of}"
        solves = {
            percent: solver(profile, budget)
            for percent, budget in tqdm(given.items(), desc=label, unit="budget", leave=False)
        }
        figures[of] = _figures(workload, profile, solves)
    return figures


def solve_seconds(
    profile: Profile, budget: float | int, repeats: int, now: Callable[[], float]
) -> tuple[list[float], bool]:
    """Seconds of each solve, and whether the budget is feasible."""
    seconds, feasible = [], True
    for _ in range(repeats):
        start = now()
        try:
            solve_policy(profile, budget)
        except InfeasibleBudgetError:
            feasible = False
        seconds.append(now() - start)
    return seconds, feasible


def _figures(workload: Workload, profile: Profile, solves: dict[int, tuple[list[float], bool]]) -> dict[str, Any]:
    medians = {percent: statistics.median(seconds) for percent, (seconds, _) in solves.items()}
    return {
        "attention": workload.attention,
        "num_blocks": workload.layers,
        "num_kinds": len(profile.kinds),
        "seconds": {str(percent): seconds for percent, seconds in medians.items()},
        "infeasible_percents": [percent for percent, (_, feasible) in solves.items() if not feasible],
        "median_seconds": statistics.median(medians.values()),
        "max_seconds": max(medians.values()),
        "max_of_all_repeats_seconds": max(max(seconds) for seconds, _ in solves.values()),
        "slowest_percent": max(medians, key=medians.__getitem__),
    }


def report_text(ledger: Ledger) -> str:
    """One line per model and kind of budget as Markdown, and the paper's bound."""
    table = markdown_table(
        [
            {
                "GPT-2": f"{row['attention']}, {row['num_blocks']} blocks, {row['num_kinds']} kinds",
                "budget of": of,
                "budgets": str(len(row["seconds"])),
                "infeasible": str(len(row["infeasible_percents"])),
                "median, s": f"{row['median_seconds']:.3f}",
                "max, s": f"{row['max_seconds']:.3f} at {row['slowest_percent']} %",
                "max of all repeats, s": f"{row['max_of_all_repeats_seconds']:.3f}",
            }
            for point in ledger.points.values()
            for of, row in point.items()
        ]
    )
    return f"{table}\n\nThe paper reports less than {ledger.summary['paper_seconds']} s.\n"


if __name__ == "__main__":
    sys.exit(main())
