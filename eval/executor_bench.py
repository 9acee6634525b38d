"""What the executor itself costs: RECOMPUTE everything against torch.utils.checkpoint, RETAIN everything against plain.

    adacc eval executor-bench

One forward and backward of GPT-2, LLaMA and T5, each in a case bound by arithmetic and in one bound by the launching of
operators; then what a new sequence length costs. Losses and gradients of all methods must be bit-equal before anything
is timed.
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
from adacc_hf.eval.records.records import RedGateError, positive_int
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
"""Timed rounds of each workload: some 20 to 30 s each on one core."""

NUM_LENGTHS = 5
"""New lengths that are tried; the median stands."""

NUM_STEADY_STEPS = 3
"""Steps after the recorded ones that give the price of a steady step, the median of them."""

Figures = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None, cases: Mapping[Workload, int] = CASES) -> int:
    """Measure every case, print the tables and save the record. Returns 1, with nothing timed, on wrong gradients."""
    parser = runner_parser("executor-bench", __doc__)
    parser.add_argument("--rounds", type=positive_int, help="timed rounds of every case (default: 15 and 150)")
    arguments, settings = parse(parser, argv, clock=True)
    rounds = {workload: arguments.rounds or default for workload, default in cases.items()}
    cases_info = [{**asdict(workload), "rounds": count} for workload, count in rounds.items()]
    run_info = {"cases": cases_info, "clock": arguments.clock, "gate_steps": GATE_STEPS}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for workload, count in rounds.items():
            measured = partial(measure, workload, count, arguments.clock, settings)
            try:
                ledger.measure(case_name(workload), measured)
            except RedGateError as error:
                print(f"adacc eval executor-bench: {case_name(workload)}: {error}", file=sys.stderr)
                return 1
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0


def case_name(workload: Workload) -> str:
    return f"{workload.family}, {workload}"


def measure(workload: Workload, num_rounds: int, clock: str, settings: Settings) -> dict[str, Figures]:
    """Step times, ratios and bytes of each method, and the cost of a new length.

    Raises RedGateError if gradients are not bit-equal.
    """
    contenders = build_contenders(workload, settings)
    check_gradients(contenders)
    memory = {contender.name: contender.memory() for contender in contenders}
    figures = timing_figures(time_rounds(contenders, num_rounds, clock))
    for name, measured in memory.items():
        overhead = figures[name]["step_ms"].median - figures[PLAIN]["step_ms"].median
        figures[name]["overhead_per_block_ms"] = overhead / workload.layers
        figures[name] |= {"stored_bytes": measured.stored_bytes, "peak_bytes": measured.peak_bytes}
        figures[name]["peak_of_checkpointing"] = measured.peak_bytes / memory[CHECKPOINTING].peak_bytes
    recomputed = next(contender for contender in contenders if contender.name == RECOMPUTED)
    checkpointing_ms = figures[CHECKPOINTING]["step_ms"].median
    new_length = new_length_figures(recomputed, checkpointing_ms, partial(step_ms, recomputed, clock))
    return {"methods": figures, "new_length": new_length}


def build_contenders(workload: Workload, settings: Settings) -> list[Contender]:
    """Plain training, HF gradient checkpointing, and Adacc with everything recomputed and everything retained."""
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
    """The time of the first and the second step at a new length against a steady one, in milliseconds.

    `extra_ms` is what both take more, and `amortised_after` the number of steps at one length after which this is made
    up for by steady steps that are quicker than `checkpointing_ms`; None if they are not. The lengths are a few tokens
    shorter than the batch. `step_ms()` runs and times one step of the contender.
    """
    whole = contender.batch
    tokens = whole["input_ids"].shape[1]
    samples = []
    try:
        for length in range(tokens - NUM_LENGTHS, tokens):
            contender.batch = {name: tensor[:, :length].contiguous() for name, tensor in whole.items()}
            first, second = step_ms(), step_ms()
            samples.append((first, second, statistics.median(step_ms() for _ in range(NUM_STEADY_STEPS))))
    finally:
        contender.batch = whole
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
    """One table per case, and one of new lengths, as Markdown."""
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
