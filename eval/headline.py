"""Adacc between plain training and checkpointing: the possible gain in speed, and the share of it that Adacc wins.

    adacc eval headline --preset gpt2-345m --device cuda --precision bf16 --batch 16
    adacc eval headline --preset llama-1b --device cuda --precision bf16 --batch 4 --tokens 2048 --limit 30GiB

All methods share one model, one batch and one process. A method's steps are timed in turn with those of plain training
and of checkpointing, so that its figures and theirs come from the same rounds. A method's budget is half of plain's
bytes, or --limit for its whole step; plain training, the upper bound, may exceed it. Last, Adacc gets the measured peak
of checkpointing as its budget. The share of the possible gain is (checkpointing - ours) / (checkpointing - plain) in
time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.records import Figures, Status, describe, positive_int
from adacc_hf.eval.throughput import Run
from adacc_hf.eval.trials.interleaved import FLOOR, run_interleaved
from adacc_hf.eval.trials.isolation import Worker, failure
from adacc_hf.eval.trials.limits import budget_bytes
from adacc_hf.eval.trials.methods import HEADLINE_METHODS
from adacc_hf.eval.trials.model_under_test import add_subject, subject_options
from adacc_hf.reports.run_record import Spread, markdown_table

HALF = 0.5
"""The budget if no limit is set: a fraction of the bytes that plain training stores."""

IN_FLOOR = "adacc_in_floor"
"""Method whose budget is the peak of FLOOR."""

GOALS = {"adacc": 0.85, IN_FLOOR: 0.65}
"""Goals for Adacc's share of the possible gain: at half of plain's bytes, and at checkpointing's peak."""


def main(argv: Sequence[str] | None = None, run: Run | None = None) -> int:
    """Measure every method, print the table, save record and table. Return 1 if a gradient check failed."""
    parser = runner_parser("headline", __doc__)
    add_subject(parser)
    parser.add_argument("--batch", type=positive_int, default=4, help="sequences per step")
    parser.add_argument("--methods", nargs="+", choices=tuple(HEADLINE_METHODS), default=list(HEADLINE_METHODS))
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument(
        "--fraction", type=float, default=HALF, help="the budget, as a fraction of plain training's bytes"
    )
    budgets.add_argument(
        "--limit", help="memory limit of a step, for example 30GiB: the budget of all methods but plain training"
    )
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed steps of each point")
    parser.add_argument("--timeout", type=positive_int, default=1800, help="time limit of one point in seconds")
    arguments, settings = parse(parser, argv, clock=True)
    if not 0.0 < arguments.fraction <= 1.0:
        raise ValueError(f"--fraction={arguments.fraction} must be in (0, 1], for example {HALF}")
    run_info = {
        "subject": subject_options(arguments) | {"batch": arguments.batch},
        "methods": arguments.methods,
        "fraction": None if arguments.limit else arguments.fraction,
        "limit_bytes": parse_bytes(arguments.limit, "--limit") if arguments.limit else None,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
    }
    with ExitStack() as stack:
        ledger = stack.enter_context(open_ledger(settings, run_info, arguments.resume))
        measure(ledger, arguments.timeout, run or stack.enter_context(Worker()))
        ledger.finish(goals={name: goal for name, goal in GOALS.items() if name == IN_FLOOR or is_at_half(run_info)})
        ledger.publish(report_text(ledger))
    return 1 if any(point["status"] == Status.RED.value for point in ledger.points.values()) else 0


def is_at_half(run_info: Mapping[str, Any]) -> bool:
    """Return True if the budget is half of plain's bytes, the setting of the goal."""
    return run_info["fraction"] == HALF


def measure(ledger: Ledger, timeout_s: float, run: Run) -> None:
    """Measure the points that the record does not have yet."""
    info, settings = ledger.run_info, ledger.settings
    limit = info["limit_bytes"]
    for method in tqdm(info["methods"], desc="headline", unit="point"):
        budget = info["fraction"] if limit is None else budget_bytes(limit, settings.device)
        if method == IN_FLOOR:
            budget = ledger.points.get(FLOOR, {}).get("peak_bytes")
            if budget is None:
                reason = f"{HEADLINE_METHODS[FLOOR].title}, whose peak is the budget, was not measured"
                ledger.measure(method, partial(failure, Status.ERROR, reason))
                continue
        order = {
            "subject": info["subject"],
            "method": method,
            "budget": budget,
            "limit_bytes": limit,
            "rounds": info["rounds"],
            "clock": info["clock"],
            "threads": settings.threads,
        }
        ledger.measure(method, partial(run, run_interleaved, order, timeout_s))


def report_text(ledger: Ledger) -> str:
    """Return the table as Markdown, and the reasons of missing points."""
    info = ledger.run_info
    subject, limit = info["subject"], info["limit_bytes"]
    budget = f"{info['fraction']:.0%} of plain's bytes" if limit is None else f"a limit of {format_bytes(limit)}"
    heading = (
        f"{subject['preset']}, batch {subject['batch']} x {subject['tokens']} tokens, {subject['precision']}, budget "
        f"{budget}; median (20th to 80th percentile) of {info['rounds']} whole training steps in turn with those of "
        "plain training and checkpointing"
    )
    parts = [heading, markdown_table([_row(method, ledger.points[method]) for method in info["methods"]])]
    goals = [f"{HEADLINE_METHODS[name].title}: {goal:.0%}" for name, goal in ledger.summary["goals"].items()]
    parts.append(f"Goals, of what can be won: {', '.join(goals)}.")
    parts += [f"{HEADLINE_METHODS[key].title}: {p['reason']}" for key, p in ledger.points.items() if "reason" in p]
    return "\n\n".join(parts) + "\n"


def _row(method: str, point: Figures) -> dict[str, str]:
    decided: dict[str, Any] = point.get("decided", {})
    stored, plain = (decided.get(name) for name in ("predicted_stored_bytes", "plain_stored_bytes"))
    return {
        "method": HEADLINE_METHODS[method].title,
        **describe(point),
        "stored, of plain's": f"{stored / plain:.0%}" if stored and plain else "",
        "x checkpointing": _ratio(point, "over_checkpointing"),
        "plain x checkpointing": _ratio(point, "plain_over_checkpointing"),
        "of what can be won": f"{point['share_won']:.0%}" if point.get("share_won") is not None else "",
        "allocator retries": str(point.get("num_alloc_retries", "")),
    }


def _ratio(point: Figures, name: str) -> str:
    return Spread(**point[name]).text(3) if name in point else ""


if __name__ == "__main__":
    sys.exit(main())
