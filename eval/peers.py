"""Tokens per second against measured peak: Adacc at several budgets, and other ways to save activation memory.

    adacc eval peers --preset gpt2-345m --device cuda --precision bf16 --batch 16

Model, batch and training step are equal for all methods, each of which runs in its own process. If a peer cannot run
here, its row gives the reason. Adacc also runs with the measured peak of each peer as its budget, so that the two are
compared at equal memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.peers_report import matched_key, report_text, save_plot
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.throughput import Run
from adacc_hf.eval.trials.isolation import failure, run_isolated
from adacc_hf.eval.trials.model_under_test import add_subject, subject_options
from adacc_hf.eval.trials.peer_methods import ADACC, COMPILED_PEERS, PEERS
from adacc_hf.eval.trials.trial import run_trial

BUDGETS = (0.75, 0.5, 0.35, 0.25, 0.15)
"""Fractions of plain training's activation bytes for Adacc."""

VARIANT_BUDGETS = (0.5, 0.25)
"""Budgets of Adacc's variants. The variant in torch.compile uses these budgets if no compiled peers are measured, as
fractions of the compiler's default bytes."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Point to measure: a method, and the budget of Adacc's methods."""

    method: str
    budget: float | None = None
    rival: str | None = None
    """Peer whose measured peak is the budget."""

    @property
    def key(self) -> str:
        if self.rival is not None:
            return matched_key(self.method, self.rival)
        return self.method if self.budget is None else f"{self.method}_{self.budget:g}"

    @property
    def title(self) -> str:
        title = PEERS[self.method].title
        if self.rival is not None:
            return f"{title}, at the peak of {PEERS[self.rival].title.removeprefix('torch.compile, ')}"
        return title if self.budget is None else f"{title} at {self.budget:.0%}"


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Measure every peer, print the tables, save record, tables and plot. Return 1 if a gradient check failed."""
    parser = runner_parser("peers", __doc__)
    add_subject(parser)
    parser.add_argument("--batch", type=positive_int, default=4, help="sequences per step")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=list(BUDGETS), help="budgets of Adacc, as fractions"
    )
    parser.add_argument(
        "--variant-budgets",
        nargs="+",
        type=float,
        default=list(VARIANT_BUDGETS),
        help="budgets of Adacc's variants, as fractions",
    )
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed steps of each peer")
    parser.add_argument("--timeout", type=positive_int, default=1800, help="time limit of one peer in seconds")
    arguments, settings = parse(parser, argv, clock=True)
    for option in ("budgets", "variant_budgets"):
        if not all(0.0 < budget <= 1.0 for budget in getattr(arguments, option)):
            name = option.replace("_", "-")
            raise ValueError(f"--{name}={getattr(arguments, option)} must be fractions in (0, 1], say 0.5 0.25")
    run_info = {
        "subject": subject_options(arguments) | {"batch": arguments.batch},
        "peers": arguments.peers,
        "budgets": arguments.budgets,
        "variant_budgets": arguments.variant_budgets,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
    }
    entries = entries_of(arguments.peers, arguments.budgets, arguments.variant_budgets, arguments.device)

    def points(ledger: Ledger) -> dict[str, Callable[[], Figures]]:
        return {entry.key: partial(measure, ledger, entry, arguments.timeout, run) for entry in entries}

    def summary(ledger: Ledger) -> dict[str, Any]:
        return {"titles": {entry.key: entry.title for entry in entries}}

    ledger = run_points(settings, run_info, arguments.resume, points, report_text, save_plot, summary)
    return 1 if ledger.has_status(Status.RED) else 0


def entries_of(
    peers: Sequence[str], budgets: Sequence[float], variant_budgets: Sequence[float], device: str
) -> list[Entry]:
    """Return the points to measure, in the order of the table.

    After its budgets, each of Adacc's methods has a point for each peer of its kind, eager or compiled, that can run on
    `device`, with that peer's peak as the budget. Adacc in torch.compile has fractions if there is no such peer.
    """
    others = [name for name in peers if name not in ADACC and name != "plain" and PEERS[name].obstacle(device) is None]
    entries: list[Entry] = []
    for name in peers:
        is_compiled = name == "adacc_compiled"
        rivals = [other for other in others if (other in COMPILED_PEERS) == is_compiled] if name in ADACC else []
        if not PEERS[name].takes_budget:
            entries.append(Entry(method=name))
        elif not (is_compiled and rivals):
            entries += [Entry(method=name, budget=b) for b in (budgets if name == "adacc" else variant_budgets)]
        entries += [Entry(method=name, rival=rival) for rival in rivals]
    return entries


def measure(ledger: Ledger, entry: Entry, timeout_s: float, run: Run) -> Figures:
    """Measure one point. If the budget is a peer's peak, the peer must have been measured before."""
    info = ledger.run_info
    order: dict[str, Any] = {
        "subject": info["subject"],
        "family": "peers",
        "method": entry.method,
        "budget": entry.budget if entry.rival is None else ledger.points[entry.rival].get("peak_bytes"),
        "rounds": info["rounds"],
        "clock": info["clock"],
        "threads": ledger.settings.threads,
    }
    if entry.rival is not None and order["budget"] is None:
        return failure(Status.ERROR, f"{PEERS[entry.rival].title}, whose peak is the budget, was not measured")
    return run(run_trial, order, timeout_s)


if __name__ == "__main__":
    sys.exit(main())
