"""What the executor itself costs: RECOMPUTE everything against torch.utils.checkpoint, RETAIN everything against plain.

    python -m adacc_hf.eval.executor_bench

One forward and backward, in a case bound by arithmetic and in one bound by the launching of operators. Losses and
gradients of all methods must be bit-equal before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from adacc_hf import Action, Policy, profile_model
from adacc_hf.eval.clock import add_clock, check_clock
from adacc_hf.eval.contenders import (
    CHECKPOINTING,
    GATE_STEPS,
    PLAIN,
    Contender,
    check_gradients,
    time_rounds,
    timing_figures,
)
from adacc_hf.eval.records import (
    RedGateError,
    Settings,
    Spread,
    add_settings,
    markdown_table,
    positive_int,
    save_record,
)
from adacc_hf.eval.workload import DEMO, LAUNCH_BOUND, Workload
from adacc_hf.units import format_bytes

CASES = {DEMO: 15, LAUNCH_BOUND: 200}
"""Timed rounds of each workload: some 20 s each on one core."""

Figures = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None, cases: Mapping[Workload, int] = CASES) -> int:
    """Measure every case, print the table and save the record. Returns 1, and saves nothing, on wrong gradients."""
    parser = argparse.ArgumentParser(prog="adacc_hf.eval.executor_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=positive_int, help="timed rounds of every case (default: 15 and 200)")
    add_clock(parser)
    add_settings(parser, "executor_bench")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    rounds = {workload: arguments.rounds or default for workload, default in cases.items()}
    try:
        results = {workload: measure(workload, count, arguments.clock, settings) for workload, count in rounds.items()}
    except RedGateError as error:
        print(f"executor_bench: {error}", file=sys.stderr)
        return 1
    cases_info = [{**asdict(workload), "rounds": count} for workload, count in rounds.items()]
    train_info = {str(workload): figures for workload, figures in results.items()}
    save_record(settings, {"cases": cases_info, "clock": arguments.clock, "gate_steps": GATE_STEPS}, train_info)
    print(f"{table_text(results)}\n\nsaved as {settings.output}")
    return 0


def measure(workload: Workload, num_rounds: int, clock: str, settings: Settings) -> Figures:
    """Step times, ratios and bytes of each method. Raises RedGateError if gradients are not bit-equal."""
    contenders = build_contenders(workload, settings)
    check_gradients(contenders)
    memory = {contender.name: contender.memory() for contender in contenders}
    figures = timing_figures(time_rounds(contenders, num_rounds, clock))
    for name, measured in memory.items():
        figures[name] |= {"stored_bytes": measured.stored_bytes, "peak_bytes": measured.peak_bytes}
        figures[name]["peak_of_checkpointing"] = measured.peak_bytes / memory[CHECKPOINTING].peak_bytes
    return figures


def build_contenders(workload: Workload, settings: Settings) -> list[Contender]:
    """Plain training, HF gradient checkpointing, and Adacc with everything recomputed and everything retained."""
    model = workload.model(settings.device, settings.seed)
    batch = next(workload.batches(settings.device, settings.seed))
    profile = profile_model(model, batch)
    return [
        Contender(PLAIN, model, batch),
        Contender(CHECKPOINTING, model, batch),
        Contender("Adacc, everything recomputed", model, batch, Policy.uniform(profile, Action.RECOMPUTE)),
        Contender("Adacc, everything retained", model, batch, Policy.uniform(profile, Action.RETAIN)),
    ]


def table_text(results: Mapping[Workload, Figures]) -> str:
    """One table per case."""
    parts = [f"{workload} (forward and backward)\n\n{_case_table(figures)}" for workload, figures in results.items()]
    note = "Medians, in brackets the 20th to 80th percentile; ratios are of medians, their brackets of single rounds."
    return "\n\n".join([*parts, note])


def _case_table(figures: Figures) -> str:
    def ratio(row: dict[str, Any], name: str) -> str:
        by_round: Spread = row[f"{name}_by_round"]
        return f"{row[name]:.2f} ({by_round.low:.2f} to {by_round.high:.2f})"

    return markdown_table(
        [
            {
                "method": name,
                "step, ms": row["step_ms"].text(1),
                "x plain": ratio(row, "of_plain"),
                "x checkpointing": ratio(row, "of_checkpointing"),
                "stored": format_bytes(row["stored_bytes"]),
                "peak": format_bytes(row["peak_bytes"]),
                "peak x checkpointing": f"{row['peak_of_checkpointing']:.3f}",
            }
            for name, row in figures.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
