"""Time to solve a policy, over budgets, for GPT-2 with fused and eager attention and for T5 (paper: 0.5 s).

    adacc eval solver

The models are narrow, which changes costs but not the size of the problem. T5 has several kinds of blocks under one
budget. For an infeasible budget, the time until the error is measured. The gap bounds the improvement that any other
policy within the budget could have.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf import InfeasibleBudgetError, profile_model, solve_policy
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.profile import Profile
from adacc_hf.eval.records.command_line import CLOCKS, parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.reports.run_record import Settings, Spread, markdown_table
from adacc_hf.solve.simple_policies import uniform_policy

CASES = (
    *(
        # Most activations have 256 KiB or more, large enough to be compressed.
        Workload(width=64, layers=layers, batch=8, tokens=128, attention=attention)
        for attention in ("sdpa", "eager")
        for layers in (12, 48)
    ),
    Workload(width=64, layers=48, batch=8, tokens=128, family="t5"),
)
Solves = tuple[list[float], float | None]
"""Seconds of each solve of one budget, and the gap of the policy: None if the budget is infeasible."""
Solver = Callable[[Profile, float | int], Solves]

PAPER_SECONDS = 0.5
LEAST_PERCENT = 5


def main(argv: Sequence[str] | None = None, cases: Sequence[Workload] = CASES) -> int:
    """Time every case, print the table and save the record."""
    parser = runner_parser("solver", __doc__)
    parser.add_argument("--step", type=positive_int, default=5, help="distance between budgets, in percent")
    parser.add_argument("--repeats", type=positive_int, default=3, help="solves of each budget; the median is reported")
    arguments, settings = parse(parser, argv, clock=True)
    percents = range(LEAST_PERCENT, 101, arguments.step)
    solver = partial(solve_seconds, repeats=arguments.repeats, now=CLOCKS[arguments.clock])
    options = {"percents": list(percents), "repeats": arguments.repeats, "clock": arguments.clock}
    points = {case_name(case): partial(measure, case, percents, solver, settings) for case in cases}
    run_info = {"cases": [asdict(case) for case in cases], **options}
    paper = {"paper_seconds": PAPER_SECONDS}
    run_points(settings, run_info, arguments.resume, lambda _: points, report_text, summary=lambda _: paper)
    return 0


def case_name(workload: Workload) -> str:
    family = "" if workload.family == "gpt2" else f"{workload.family}, "
    return f"{family}{workload.attention}, {workload.layers} blocks"


def measure(workload: Workload, percents: Sequence[int], solver: Solver, settings: Settings) -> dict[str, Any]:
    """Measure the solve times of one model, for budgets of stored bytes ("stored") and budgets of the peak ("peak")."""
    model = workload.model(settings.device, settings.seed)
    profile = profile_model(model, next(workload.batches(settings.device, settings.seed)))
    plain = uniform_policy(profile, Action.RETAIN)
    budgets: dict[str, dict[int, float | int]] = {
        "stored": {percent: percent / 100 for percent in percents},
        "peak": {percent: plain.predicted_peak_bytes * percent // 100 for percent in percents},
    }
    figures = {}
    for budget_kind, budget_by_percent in budgets.items():
        label = f"{case_name(workload)}, {budget_kind}"
        solves = {
            percent: solver(profile, budget)
            for percent, budget in tqdm(budget_by_percent.items(), desc=label, unit="budget", leave=False)
        }
        figures[budget_kind] = _figures(workload, profile, solves)
    return figures


def solve_seconds(profile: Profile, budget: float | int, repeats: int, now: Callable[[], float]) -> Solves:
    """Return the seconds of each solve, and the policy's gap."""
    seconds, gap = [], None
    for _ in range(repeats):
        start = now()
        try:
            gap = dict(solve_policy(profile, budget).facts)["gap"]
        except InfeasibleBudgetError:
            gap = None
        seconds.append(now() - start)
    return seconds, gap


def _figures(workload: Workload, profile: Profile, solves: dict[int, Solves]) -> dict[str, Any]:
    medians = {percent: statistics.median(seconds) for percent, (seconds, _) in solves.items()}
    gaps = [gap for _, gap in solves.values() if gap is not None]
    return {
        "attention": workload.attention,
        "num_blocks": workload.layers,
        "num_kinds": len(profile.kinds),
        "seconds": {str(percent): seconds for percent, seconds in medians.items()},
        "infeasible_percents": [percent for percent, (_, gap) in solves.items() if gap is None],
        "median_seconds": statistics.median(medians.values()),
        "max_seconds": max(medians.values()),
        "max_of_all_repeats_seconds": max(max(seconds) for seconds, _ in solves.values()),
        "slowest_percent": max(medians, key=medians.__getitem__),
        "gap": Spread.of(gaps) if gaps else None,
    }


def report_text(ledger: Ledger) -> str:
    """Return one line per model and kind of budget as Markdown, and the paper's bound."""
    table = markdown_table(
        [
            {
                "model": f"{name if name.startswith('t5') else f'gpt2, {name}'}, {row['num_kinds']} kinds",
                "budget of": budget_kind,
                "budgets": str(len(row["seconds"])),
                "infeasible": str(len(row["infeasible_percents"])),
                "median, s": f"{row['median_seconds']:.3f}",
                "max, s": f"{row['max_seconds']:.3f} at {row['slowest_percent']} %",
                "max of all repeats, s": f"{row['max_of_all_repeats_seconds']:.3f}",
                "gap, %": f"{100 * gap['median']:.2f} (to {100 * gap['high']:.2f})" if (gap := row.get("gap")) else "",
            }
            for name, point in ledger.points.items()
            for budget_kind, row in point.items()
        ]
    )
    return f"{table}\n\nThe paper reports less than {ledger.summary['paper_seconds']} s.\n"


if __name__ == "__main__":
    sys.exit(main())
