"""Validation loss over training, by each of the paper's methods, and its gap to plain training (Figure 6).

    adacc eval loss --preset gpt2-117m --device cuda --precision bf16 --steps 5000 --text pile.txt

Every method trains the same model with the Trainer: same seed, same data in the same order. The text is read as bytes.
An interrupted run resumes at the Trainer's last checkpoint of the interrupted method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.budget_values import check_memory_budget, read_fraction
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.methods import PAPER_METHODS
from adacc_hf.eval.trials.model_under_test import add_subject, subject_options
from adacc_hf.eval.trials.training import train_curve
from adacc_hf.reports.run_record import markdown_table

PAPER_GAP_PERCENT = (0.46, 0.5)
"""Adacc's difference from plain training in the paper (section 4.3, GPT-117M and GPT-345M)."""


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Train by every method, print the table, save record, table and plot. Return 1 if a run failed."""
    parser = runner_parser("loss", __doc__)
    add_subject(parser)
    parser.add_argument("--batch", type=positive_int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=positive_int, default=50)
    parser.add_argument("--eval-every", type=positive_int, default=10, help="steps between two validation losses")
    parser.add_argument("--eval-sequences", type=positive_int, default=32, help="held-out sequences")
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--budget", default="0.25", help='Adacc\'s memory budget: a fraction, a size or "auto"')
    parser.add_argument(
        "--text", type=Path, help="file whose bytes are the data (default: the running Python's standard library)"
    )
    parser.add_argument("--methods", nargs="+", choices=tuple(PAPER_METHODS), default=list(PAPER_METHODS))
    parser.add_argument("--timeout", type=positive_int, help="time limit of one training in seconds (default: none)")
    arguments, settings = parse(parser, argv)
    budget = read_fraction(arguments.budget)
    check_memory_budget(budget)
    if not 0.0 < arguments.learning_rate <= 1.0:
        raise ValueError(f"--learning-rate={arguments.learning_rate} must be in (0, 1], for example 7e-4")
    if arguments.text is not None and not arguments.text.is_file():
        raise FileNotFoundError(f"--text={arguments.text} is not a file: pass an existing file, or leave out --text")
    training = {
        "steps": arguments.steps,
        "eval_every": min(arguments.eval_every, arguments.steps),
        "eval_sequences": arguments.eval_sequences,
        "learning_rate": arguments.learning_rate,
        "budget": budget,
        "text": None if arguments.text is None else str(arguments.text),
    }
    subject = subject_options(arguments) | {"batch": arguments.batch}
    run_info = {"subject": subject, "methods": arguments.methods, **training}

    def train(method: str) -> Figures:
        # The Trainer's checkpoints are next to the record until the training ends.
        folder = str(settings.output.with_suffix("") / method)
        order = {"subject": subject, "method": method, "folder": folder, "threads": settings.threads, **training}
        return run(train_curve, order, arguments.timeout)

    def points(ledger: Ledger) -> dict[str, Callable[[], Figures]]:
        return {method: partial(train, method) for method in arguments.methods}

    def summary(ledger: Ledger) -> dict[str, Any]:
        plain = ledger.points.get("none", {})
        gaps = {name: gap(plain, ledger.points[name]) for name in arguments.methods if name != "none"}
        return {"gap_to_plain": gaps, "paper_gap_percent": PAPER_GAP_PERCENT}

    ledger = run_points(settings, run_info, arguments.resume, points, report_text, save_plot, summary)
    return 1 if ledger.reasons() else 0


def save_plot(ledger: Ledger) -> None:
    """Plot the gap of each method's validation loss to plain training's over the steps. The losses themselves would be
    one line. Without plain training, plot the losses."""
    losses = {PAPER_METHODS[n].title: dict(p["curve"]) for n, p in ledger.points.items() if "curve" in p}
    path = ledger.settings.output.with_suffix(".svg")
    plain = losses.get(PAPER_METHODS["none"].title)
    if plain is None:
        curves(path, {name: list(curve.items()) for name, curve in losses.items()}, "step", "validation loss")
        return
    gaps = {
        name: [(step, 100 * (loss / plain[step] - 1)) for step, loss in curve.items() if step in plain]
        for name, curve in losses.items()
    }
    curves(path, gaps, "step", "validation loss, gap to plain in %")


def gap(plain: Figures, other: Figures) -> dict[str, float] | None:
    """Return the gaps of a curve to plain training's, in percent of plain's loss, or None if a curve is missing.

    The drift is the mean of the signed gaps. The drift is near 0 for a method whose gaps have both signs equally often.
    """
    if "curve" not in plain or "curve" not in other:
        return None
    expected = dict(plain["curve"])
    percents = [100.0 * (loss / expected[step] - 1.0) for step, loss in other["curve"]]
    return {
        "final_percent": percents[-1],
        "largest_percent": max(percents, key=abs),
        "mean_drift_percent": sum(percents) / len(percents),
    }


def report_text(ledger: Ledger) -> str:
    """Return the table as Markdown, and the paper's gap."""
    info = ledger.run_info
    subject = info["subject"]
    gaps = ledger.summary["gap_to_plain"]
    rows = [_row(name, ledger.points[name], gaps.get(name)) for name in info["methods"]]
    heading = (
        f"Validation loss of {subject['preset']} after {info['steps']} steps of {subject['batch']} x "
        f"{subject['tokens']} tokens, {subject['precision']}, seed {subject['seed']}, Adacc's budget {info['budget']}"
    )
    low, high = PAPER_GAP_PERCENT
    note = f"The paper's gap of Adacc to plain training: {low} to {high} %."
    return "\n\n".join([heading, markdown_table(rows), note, *ledger.reasons()]) + "\n"


def _row(name: str, point: Figures, gaps: dict[str, float] | None) -> dict[str, str]:
    def percent(key: str) -> str:
        return "" if gaps is None else f"{gaps[key]:+.3f} %"

    return {
        "method": PAPER_METHODS[name].title,
        "validation loss": f"{point['curve'][-1][1]:.4f}" if "curve" in point else point["status"].replace("_", " "),
        "gap to plain": percent("final_percent"),
        "largest gap": percent("largest_percent"),
        "mean drift": percent("mean_drift_percent"),
    }


if __name__ == "__main__":
    sys.exit(main())
