"""What a budget costs, from the least that will do to one that everything fits: overhead and peak at many budgets.

    adacc eval budget-sweep

Each model is profiled once and solved for every budget. The overhead that is predicted must not rise with the budget,
the peak that the allocator measures must keep to it, and blocks that may differ must not cost more than one plan for
all blocks of a kind, nor more than the greedy rule behind the paper's Table 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from adacc_hf import AdaccConfig, InfeasibleBudgetError, Policy, Profile, profile_model, solve_policy
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.peak_accuracy import least_peak_bytes, measured_peak
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Settings, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.families import ATTENTIONS, FAMILIES, Size
from adacc_hf.eval.trials.greedy import solve_greedy
from adacc_hf.eval.trials.limits import keeps_to
from adacc_hf.eval.trials.one_policy import one_plan_policies

MS_ROUNDING = 1e-9
"""What sums of the same times in another order may differ by."""
DEFAULT_FAMILIES = ("gpt2", "t5")
"""One kind of block, and two under one budget."""

Point = dict[str, Any]


def main(argv: Sequence[str] | None = None, size: Size | None = None) -> int:
    """Sweep every model, draw the plot and save the record. Returns 1 if a promise above does not hold."""
    parser = argparse.ArgumentParser(prog="adacc eval budget-sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=DEFAULT_FAMILIES, help="which to sweep")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=ATTENTIONS, help="which to sweep")
    parser.add_argument("--budgets", type=positive_int, default=40, help="budgets per model, 2 or more")
    add_resume(parser)
    add_settings(parser, "budget_sweep")
    arguments = parser.parse_args(argv)
    if arguments.budgets < 2:
        raise ValueError(f"--budgets={arguments.budgets} must be 2 or more: the floor, and what everything fits")
    settings, size = Settings.from_arguments(arguments), size or Size()
    cases = [(family, attention) for family in arguments.family for attention in arguments.attention]
    run_info = {"cases": cases, "size": asdict(size), "budgets": arguments.budgets}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for family, attention in tqdm(cases, desc="budget-sweep", unit="model"):
            ledger.measure(
                f"{family}, {attention}", partial(measure, family, attention, size, arguments.budgets, settings)
            )
        sweeps = {name: point["budgets"] for name, point in ledger.points.items()}
        faults = [f"{name}: {fault}" for name, rows in sweeps.items() for fault in find_faults(rows, settings.device)]
        ledger.finish(faults=faults)
        draw(ledger)
        ledger.publish(report_text(ledger))
    return 1 if faults else 0


def measure(family: str, attention: str, size: Size, num_budgets: int, settings: Settings) -> Point:
    """One model at `num_budgets` budgets, at even distances from the floor to plain training's peak."""
    model = FAMILIES[family].model(size, attention, settings.device, settings.seed)
    batch = size.batches(settings.device, settings.seed)
    config = AdaccConfig()
    profile = profile_model(model, batch, config)
    floor = least_peak_bytes(profile, config)
    plain = Policy.uniform(profile, Action.RETAIN).predicted_peak_bytes
    one_plan = one_plan_policies(profile, config)
    rows = []
    for i in tqdm(range(num_budgets), desc=f"{family}, {attention}", unit="budget", leave=False):
        budget = floor + (plain - floor) * i // (num_budgets - 1)
        policy = solve_policy(profile, budget, config)
        rows.append(_row(budget, policy, profile, one_plan) | {"measured_bytes": measured_peak(model, batch, policy)})
    return {"step_ms": profile.step_ms, "num_blocks": len(profile.blocks), "plain_bytes": plain, "budgets": rows}


def _row(budget: int, policy: Policy, profile: Profile, one_plan: Sequence[Policy]) -> Point:
    facts = dict(policy.facts)
    fitting = [other.predicted_overhead_ms for other in one_plan if other.predicted_peak_bytes <= budget]
    return {
        "budget_bytes": budget,
        "predicted_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
        "one_plan_ms": min(fitting, default=None),
        "greedy_ms": _greedy_ms(profile, budget),
        "gap": facts["gap"],
        "solve_seconds": facts["seconds"],
    }


def _greedy_ms(profile: Profile, budget: int) -> float | None:
    """The greedy policy's overhead; None where it does not come down to the budget."""
    try:
        return solve_greedy(profile, budget).predicted_overhead_ms
    except InfeasibleBudgetError:
        return None


def find_faults(rows: Sequence[Point], device: str) -> list[str]:
    """The promises that a sweep, its budgets rising, does not keep."""
    faults = [
        f"at {right['budget_bytes']} bytes the overhead is {right['overhead_ms']} ms, more than {left['overhead_ms']} "
        f"ms at {left['budget_bytes']} bytes"
        for left, right in pairwise(rows)
        if right["overhead_ms"] > left["overhead_ms"] + MS_ROUNDING
    ]
    for row in rows:
        at = f"at {row['budget_bytes']} bytes"
        if not keeps_to(row["measured_bytes"], row["budget_bytes"], device):
            faults.append(f"{at} the peak measured is {row['measured_bytes']} bytes")
        for name, other in (("one plan for all costs", "one_plan_ms"), ("the greedy rule costs", "greedy_ms")):
            if row[other] is not None and row["overhead_ms"] > row[other] + MS_ROUNDING:
                faults.append(f"{at} {name} {row[other]} ms, less than {row['overhead_ms']} ms")
    return faults


def draw(ledger: Ledger) -> None:
    """Write the plot beside the record: overhead against budget, by model."""
    series: dict[str, list[tuple[float, float]]] = {}
    for case, point in ledger.points.items():
        for row in point["budgets"]:
            x = 100 * row["budget_bytes"] / point["plain_bytes"]
            for suffix, name in (("", "overhead_ms"), (", one plan for all", "one_plan_ms")):
                if row[name] is not None:
                    series.setdefault(case + suffix, []).append((x, 100 * row[name] / point["step_ms"]))
    path = ledger.settings.output.with_suffix(".svg")
    curves(path, series, "budget, % of plain training's peak", "predicted overhead, % of a step recomputed in full")


def report_text(ledger: Ledger) -> str:
    """The table as Markdown, and what does not hold."""
    rows = [_cells(name, point) for name, point in ledger.points.items()]
    faults = ledger.summary["faults"] or ["Overhead never rises with the budget, and no measured peak is above it."]
    return "\n\n".join([markdown_table(rows), *faults]) + "\n"


def _cells(name: str, point: Point) -> dict[str, str]:
    rows = point["budgets"]
    return {
        "model": f"{name}, {point['num_blocks']} blocks",
        "budgets": f"{len(rows)}, {format_bytes(rows[0]['budget_bytes'])} to {format_bytes(rows[-1]['budget_bytes'])}",
        "overhead, ms": f"{rows[0]['overhead_ms']:.2f} to {rows[-1]['overhead_ms']:.2f}",
        "peak over budget": f"{sum(row['measured_bytes'] > row['budget_bytes'] for row in rows)} of {len(rows)}",
        "peak, % of the budget": _percents([row["measured_bytes"] / row["budget_bytes"] for row in rows]),
        "gain on one plan for all, %": _gains(rows, "one_plan_ms"),
        "gain on the greedy rule, %": _gains(rows, "greedy_ms"),
        "median solve, s": f"{sorted(row['solve_seconds'] for row in rows)[len(rows) // 2]:.3f}",
    }


def _gains(rows: Sequence[Point], other: str) -> str:
    """The overhead saved beside another way to choose, and at how many budgets that finds no policy at all."""
    gains = [1 - row["overhead_ms"] / row[other] for row in rows if row[other]]
    missing = sum(row[other] is None for row in rows)
    text = _percents(gains) if gains else "-"
    return f"{text}; {missing} not met" if missing else text


def _percents(parts: Sequence[float]) -> str:
    return f"{100 * sum(parts) / len(parts):.1f} ({100 * min(parts):.1f} to {100 * max(parts):.1f})"


if __name__ == "__main__":
    sys.exit(main())
