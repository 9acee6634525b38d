"""What each part of Adacc is worth: step time, peak and validation loss with one part taken away.

    adacc eval ablation --preset gpt2-345m --device cuda --precision bf16 --budget 0.25

Without compression, without recomputation, with one policy for all layers as in the paper, without outlier channels;
all within the same fraction of plain training's activation bytes, each in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tqdm import tqdm

from adacc_hf.eval.loss import add_training, gap, train, training_options
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import (
    Figures,
    Settings,
    Spread,
    Status,
    add_settings,
    describe,
    markdown_table,
    positive_int,
)
from adacc_hf.eval.throughput import Run
from adacc_hf.eval.trials.clock import add_clock, check_clock
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.methods import ABLATION_METHODS
from adacc_hf.eval.trials.subject import add_subject, subject_options
from adacc_hf.eval.trials.trial import run_trial

ENDS = (Status.MEASURED.value, Status.OUT_OF_MEMORY.value)
"""A variant that nothing fits is a result: the part that is missing was needed for this budget."""


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Measure and train every variant, print the table, save record and table. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="adacc eval ablation", description=__doc__.partition("\n")[0])
    add_subject(parser)
    add_training(parser)
    parser.set_defaults(batch=4, steps=40)
    parser.add_argument("--methods", nargs="+", choices=tuple(ABLATION_METHODS), default=list(ABLATION_METHODS))
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed steps of each variant")
    parser.add_argument("--timeout", type=positive_int, default=3600, help="seconds that one process may take")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "ablation")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    options = training_options(arguments)
    if not isinstance(options["budget"], float):
        raise ValueError(f"--budget={arguments.budget} must be a fraction, say 0.25: one plan for all needs one")
    run_info = {
        "subject": subject_options(arguments) | {"batch": arguments.batch},
        "methods": arguments.methods,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        **options,
    }
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for method in tqdm(arguments.methods, desc="ablation", unit="variant"):
            measure(ledger, method, arguments.timeout, run)
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0 if all(point["status"] in ENDS for point in ledger.points.values()) else 1


def measure(ledger: Ledger, method: str, timeout_s: float, run: Run) -> None:
    """Fill in the variant's two points: its steps, and the losses of its training unless it cannot keep the budget."""
    info = ledger.run_info
    order = {
        "subject": info["subject"],
        "family": "ablation",
        "method": method,
        "budget": info["budget"] if ABLATION_METHODS[method].takes_budget else None,
        "rounds": info["rounds"],
        "clock": info["clock"],
        "threads": ledger.settings.threads,
    }
    steps = ledger.measure(f"{method}, steps", lambda: run(run_trial, order, timeout_s))
    if steps["status"] == Status.MEASURED.value:
        ledger.measure(f"{method}, loss", lambda: train(ledger, method, timeout_s, run))


def report_text(ledger: Ledger) -> str:
    """The table as Markdown, and why something is missing in it."""
    info = ledger.run_info
    subject = info["subject"]
    heading = (
        f"{subject['preset']}, batch {subject['batch']} x {subject['tokens']} tokens, {subject['precision']}, budget "
        f"{info['budget']:.0%} of plain training's activation bytes; loss after {info['steps']} steps"
    )
    rows = [_row(ledger, method) for method in info["methods"]]
    failed = [f"{key}: {point['reason']}" for key, point in ledger.points.items() if "reason" in point]
    return "\n\n".join([heading, markdown_table(rows), *failed]) + "\n"


def _row(ledger: Ledger, method: str) -> dict[str, str]:
    steps = ledger.points[f"{method}, steps"]
    losses: Figures = ledger.points.get(f"{method}, loss", {})
    found = gap(ledger.points.get("none, loss", {}), losses)
    cells = describe(steps)
    return {
        "variant": ABLATION_METHODS[method].title,
        "step, ms": Spread(**steps["step_ms"]).text(1) if "step_ms" in steps else cells["tokens/s"],
        "peak": cells["peak"],
        "gradient error": f"{steps['gate']['gradient_error']:.4f}" if "gate" in steps else "",
        "validation loss": f"{losses['curve'][-1][1]:.4f}" if "curve" in losses else "",
        "gap to plain": f"{found['final_percent']:+.3f} %" if found else "",
    }


if __name__ == "__main__":
    sys.exit(main())
