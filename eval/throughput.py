"""Tokens per second and peak memory against batch size, by each of the paper's methods (Figure 5).

    adacc eval throughput --preset gpt2-345m --device cuda --precision bf16 --batches 1 4 8 16 32

Every point runs in its own process. A point that exceeds the memory limit is marked in the table. On a GPU, the
allocator refuses requests beyond the limit. On a CPU, the live bytes of a step are counted. Adacc's budget is the
limit. If gradients are wrong, nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.plots import PlotPoint, curves, speed_point
from adacc_hf.eval.records.records import Figures, Status, describe
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.limits import add_limit, budget_bytes, limit_bytes
from adacc_hf.eval.trials.methods import METHODS, PAPER_METHODS
from adacc_hf.eval.trials.model_under_test import add_subject, subject_options
from adacc_hf.eval.trials.trial import run_trial
from adacc_hf.reports.run_record import markdown_table

PAPER = {"full": (1.01, 1.37), "quantization": (1.09, 1.28)}
"""Adacc's tokens per second divided by another method's, in the paper: lowest and highest (section 4.2, V100 GPUs)."""

Run = Callable[..., Figures]


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Measure every point, print the table, save record, table and plot. Return 1 if a gradient check failed."""
    parser = runner_parser("throughput", __doc__)
    add_subject(parser)
    add_limit(parser)
    parser.add_argument("--batches", type=positive_int, nargs="+", default=[1, 2, 4, 8], help="batch sizes")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(PAPER_METHODS))
    parser.add_argument("--rounds", type=positive_int, default=5, help="timed steps of each point")
    parser.add_argument("--timeout", type=positive_int, default=1800, help="time limit of one point in seconds")
    arguments, settings = parse(parser, argv, clock=True)
    limit = limit_bytes(arguments)
    run_info = {
        "subject": subject_options(arguments),
        "limit_bytes": limit,
        "methods": arguments.methods,
        "batches": arguments.batches,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
    }
    keys = [(method, batch) for batch in arguments.batches for method in arguments.methods]

    def points(ledger: Ledger) -> dict[str, Callable[[], Figures]]:
        orders = {point_key(*key): limited_order(ledger, *key) for key in keys}
        more = {"rounds": arguments.rounds, "clock": arguments.clock}
        return {key: partial(run, run_trial, order | more, arguments.timeout) for key, order in orders.items()}

    def summary(ledger: Ledger) -> dict[str, Any]:
        ratios = {name: speed_ratios(ledger, name) for name in PAPER if name in arguments.methods}
        return {"adacc_over": ratios, "paper": PAPER}

    ledger = run_points(settings, run_info, arguments.resume, points, report_text, save_plot, summary)
    return 1 if ledger.has_status(Status.RED) else 0


def point_key(method: str, batch: int) -> str:
    return f"{method}, batch {batch}"


def limited_order(ledger: Ledger, method: str, batch: int) -> dict[str, Any]:
    """Return the arguments of `run_trial` for one of the paper's methods within the memory limit."""
    info, settings = ledger.run_info, ledger.settings
    return {
        "subject": info["subject"] | {"batch": batch},
        "family": "paper",
        "method": method,
        "budget": budget_bytes(info["limit_bytes"], settings.device),
        "limit_bytes": info["limit_bytes"],
        "threads": settings.threads,
    }


def speed_ratios(ledger: Ledger, other: str) -> dict[int, float]:
    """Return Adacc's tokens per second divided by the other method's, by batch size, where both were timed."""
    ratios = {}
    for batch in ledger.run_info["batches"]:
        points = [ledger.points.get(point_key(name, batch), {}) for name in ("adacc", other)]
        if all("tokens_per_second" in point for point in points):
            own, others = (point["tokens_per_second"]["median"] for point in points)
            ratios[batch] = own / others
    return ratios


def report_text(ledger: Ledger) -> str:
    """Return the tables as Markdown, and the paper's figures."""
    info = ledger.run_info
    subject = info["subject"]
    heading = (
        f"{subject['preset']}, {subject['tokens']} tokens per sequence, {subject['precision']}, limit "
        f"{format_bytes(info['limit_bytes'])}; median tokens/s (20th to 80th percentile) of whole training steps"
    )
    parts = [heading, _table(ledger, "tokens/s"), "Peak bytes of a step:", _table(ledger, "peak")]
    for name, by_batch in ledger.summary["adacc_over"].items():
        low, high = PAPER[name]
        ours = f"{min(by_batch.values()):.2f} to {max(by_batch.values()):.2f}" if by_batch else "no common point"
        title = METHODS[name].title
        parts.append(f"Adacc's tokens/s over those of {title}: {ours} (paper, on V100 GPUs: {low:.2f} to {high:.2f})")
    return "\n\n".join([*parts, *ledger.failures()]) + "\n"


def _table(ledger: Ledger, cell: str) -> str:
    rows = []
    for method in ledger.run_info["methods"]:
        cells = {
            f"batch {batch}": describe(ledger.points[point_key(method, batch)])[cell]
            for batch in ledger.run_info["batches"]
        }
        rows.append({"method": METHODS[method].title} | cells)
    return markdown_table(rows)


def save_plot(ledger: Ledger) -> None:
    """Plot tokens per second against batch size."""
    series: dict[str, list[PlotPoint]] = {}
    missing: dict[str, list[float]] = {}
    for method in ledger.run_info["methods"]:
        title = METHODS[method].title
        for batch in ledger.run_info["batches"]:
            point: dict[str, Any] = ledger.points[point_key(method, batch)]
            if "tokens_per_second" in point:
                series.setdefault(title, []).append(speed_point(batch, point["tokens_per_second"]))
            elif point["status"] == Status.OUT_OF_MEMORY.value:
                missing.setdefault(title, []).append(batch)
    curves(ledger.settings.output.with_suffix(".svg"), series, "batch size", "tokens/s", missing, from_zero=True)


if __name__ == "__main__":
    sys.exit(main())
