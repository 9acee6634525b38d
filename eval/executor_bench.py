"""Overhead of the executor: RECOMPUTE-everything against torch's checkpoint, RETAIN-everything against plain.

    adacc eval executor-bench

One forward and backward of GPT-2, LLaMA and T5 is timed, each in a compute-bound and in a launch-bound case; then the
cost of a new sequence length is measured. Before anything is timed, losses and gradients of all methods must be
bit-equal.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from adacc_hf import Action, profile_model
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.records import WrongResultError, positive_int
from adacc_hf.eval.trials.contenders import (
    CHECKPOINTING,
    GATE_STEPS,
    PLAIN,
    Contender,
    check_gradients,
    ratio_text,
    step_ms,
    time_rounds,
    timing_figures,
)
from adacc_hf.eval.trials.families import FAMILIES
from adacc_hf.eval.trials.workload import LAUNCH_BOUND, Workload
from adacc_hf.reports.run_record import Settings, Spread, markdown_table
from adacc_hf.solve.simple_policies import uniform_policy

RECOMPUTED, RETAINED = "Adacc, everything recomputed", "Adacc, everything retained"

COMPUTE_BOUND = Workload(width=256, layers=4, batch=4, tokens=256)

CASES = {
    replace(workload, family=family): rounds
    for workload, rounds in {COMPUTE_BOUND: 15, LAUNCH_BOUND: 150}.items()
    for family in FAMILIES
}
"""Timed rounds of each workload: about 20 to 30 s each on one core."""

NUM_LENGTHS = 5
"""New lengths that are measured; the median is reported."""

NUM_STEADY_STEPS = 3
"""Steps after the recorded ones, whose median is the time of a steady step."""

Figures = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None, cases: Mapping[Workload, int] = CASES) -> int:
    """Measure every case, print the tables and save the record. Return 1, with nothing timed, on wrong gradients."""
    parser = runner_parser("executor-bench", __doc__)
    parser.add_argument("--rounds", type=positive_int, help="timed rounds of every case (default: 15 and 150)")
    arguments, settings = parse(parser, argv, clock=True)
    rounds = {workload: arguments.rounds or default for workload, default in cases.items()}
    cases_info = [{**asdict(workload), "rounds": count} for workload, count in rounds.items()]
    run_info = {"cases": cases_info, "clock": arguments.clock, "gate_steps": GATE_STEPS}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for workload, count in rounds.items():
            measure_case = partial(measure, workload, count, arguments.clock, settings)
            try:
                ledger.measure(case_name(workload), measure_case)
            except WrongResultError as error:
                print(f"adacc eval executor-bench: {case_name(workload)}: {error}", file=sys.stderr)
                return 1
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0


def case_name(workload: Workload) -> str:
    return f"{workload.family}, {workload}"


def measure(workload: Workload, num_rounds: int, clock: str, settings: Settings) -> dict[str, Figures]:
    """Measure step times, ratios and bytes of each method, and the cost of a new length.

    Raise WrongResultError if gradients are not bit-equal.
    """
    contenders = build_contenders(workload, settings)
    check_gradients(contenders)
    memory = {contender.name: contender.memory() for contender in contenders}
    figures = timing_figures(time_rounds(contenders, num_rounds, clock))
    for name, step_memory in memory.items():
        overhead = figures[name]["step_ms"].median - figures[PLAIN]["step_ms"].median
        figures[name]["overhead_per_block_ms"] = overhead / workload.layers
        figures[name] |= {"stored_bytes": step_memory.stored_bytes, "peak_bytes": step_memory.peak_bytes}
        figures[name]["peak_of_checkpointing"] = step_memory.peak_bytes / memory[CHECKPOINTING].peak_bytes
    recompute_contender = next(contender for contender in contenders if contender.name == RECOMPUTED)
    checkpointing_ms = figures[CHECKPOINTING]["step_ms"].median
    new_length = new_length_figures(recompute_contender, checkpointing_ms, partial(step_ms, recompute_contender, clock))
    return {"methods": figures, "new_length": new_length}


def build_contenders(workload: Workload, settings: Settings) -> list[Contender]:
    """Return plain training, HF gradient checkpointing, and Adacc with everything recomputed and everything
    retained."""
    model = workload.model(settings.device, settings.seed)
    batch = next(workload.batches(settings.device, settings.seed))
    profile = profile_model(model, batch)
    return [
        Contender(PLAIN, model, batch),
        Contender(CHECKPOINTING, model, batch),
        Contender(RECOMPUTED, model, batch, uniform_policy(profile, Action.RECOMPUTE)),
        Contender(RETAINED, model, batch, uniform_policy(profile, Action.RETAIN)),
    ]


def new_length_figures(contender: Contender, checkpointing_ms: float, step_ms: Callable[[], float]) -> dict[str, Any]:
    """Return the times of the first, the second and a steady step at a new length, in milliseconds.

    `extra_ms` is the excess of the first two over steady steps. `amortised_after` is the number of steps at one length
    after which steady steps, if faster than `checkpointing_ms`, have made up for the excess; None if they are not
    faster. The lengths are a few tokens shorter than the batch. `step_ms()` runs and times one step of the contender.
    """
    full_batch = contender.batch
    tokens = full_batch["input_ids"].shape[1]
    samples = []
    try:
        for length in range(tokens - NUM_LENGTHS, tokens):
            contender.batch = {name: tensor[:, :length].contiguous() for name, tensor in full_batch.items()}
            first, second = step_ms(), step_ms()
            samples.append((first, second, statistics.median(step_ms() for _ in range(NUM_STEADY_STEPS))))
    finally:
        contender.batch = full_batch
    first, second, steady = (statistics.median(column) for column in zip(*samples, strict=True))
    extra = max(0.0, first - steady) + max(0.0, second - steady)
    saved = checkpointing_ms - steady
    return {
        "first_ms": first,
        "second_ms": second,
        "steady_ms": steady,
        "extra_ms": extra,
        "amortised_after": math.ceil(extra / saved) if saved > 0 else None,
    }


def report_text(ledger: Ledger) -> str:
    """Return one table per case, and one of new lengths, as Markdown."""
    parts = [
        f"{name} (forward and backward)\n\n{_case_table(figures['methods'])}" for name, figures in ledger.points.items()
    ]
    note = "Medians, in brackets the 20th to 80th percentile; ratios are of medians, their brackets of single rounds."
    lengths = "Everything recomputed, at a length not seen before: its first two steps are recorded"
    return "\n\n".join([*parts, note, lengths, _new_length_table(ledger.points)]) + "\n"


def _new_length_table(points: Mapping[str, dict[str, Figures]]) -> str:
    rows = {name: figures["new_length"] for name, figures in points.items()}
    return markdown_table(
        [
            {
                "case": name,
                "first step, ms": f"{row['first_ms']:.1f}",
                "second": f"{row['second_ms']:.1f}",
                "steady": f"{row['steady_ms']:.1f}",
                "made up for, against checkpointing, after": "never"
                if row["amortised_after"] is None
                else f"{row['amortised_after']} steps",
            }
            for name, row in rows.items()
        ]
    )


def _case_table(figures: Figures) -> str:
    return markdown_table(
        [
            {
                "method": name,
                "step, ms": Spread(**row["step_ms"]).text(1),
                "x plain": ratio_text(row, "of_plain"),
                "x checkpointing": ratio_text(row, "of_checkpointing"),
                "overhead per block, ms": f"{row['overhead_per_block_ms']:.2f}",
                "stored": format_bytes(row["stored_bytes"]),
                "peak": format_bytes(row["peak_bytes"]),
                "peak x checkpointing": f"{row['peak_of_checkpointing']:.3f}",
            }
            for name, row in figures.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
