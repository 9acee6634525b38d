"""Largest batch that trains within a memory limit, by each of the paper's methods (Table 3).

    adacc eval max-batch --preset gpt2-345m --device cuda --precision bf16 --limit 32GiB

The search (`largest`) starts from the best batch of the earlier methods. Every trial runs whole training steps in its
own process. The limit is the GPU's memory or `--limit`. On a CPU, the live bytes of a step are compared with the limit.
Adacc's budget is the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.throughput import Run, limited_order, point_key
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.limits import add_limit, limit_bytes
from adacc_hf.eval.trials.methods import METHODS, PAPER_METHODS
from adacc_hf.eval.trials.model_under_test import add_subject, subject_options
from adacc_hf.eval.trials.trial import run_trial
from adacc_hf.reports.run_record import markdown_table

PAPER = {
    "gpt2-117m": {"none": 57, "full": 136, "quantization": 98, "adacc": 136},
    "gpt2-345m": {"none": 8, "full": 61, "quantization": 19, "adacc": 61},
    "gpt2-4.7b": {"none": 1, "full": 4, "quantization": 3, "adacc": 4},
}
"""The paper's Table 3: eight V100 GPUs of 32 GB, with ZeRO."""


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Search for every method, print the table, save record and table. Return 1 if a trial failed for reasons other
    than memory."""
    parser = runner_parser("max-batch", __doc__)
    add_subject(parser)
    add_limit(parser)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(PAPER_METHODS))
    parser.add_argument("--most", type=positive_int, default=4096, help="upper bound of the search")
    parser.add_argument("--timeout", type=positive_int, default=1800, help="time limit of one trial in seconds")
    arguments, settings = parse(parser, argv)
    run_info = {
        "subject": subject_options(arguments),
        "limit_bytes": limit_bytes(arguments),
        "methods": arguments.methods,
        "most": arguments.most,
    }
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        largest_batches: dict[str, int] = {}
        for name in arguments.methods:
            # The largest batches of the methods are close. Starting at the best one so far saves trials.
            first = max(largest_batches.values(), default=0) or 1
            largest_batches[name] = search(ledger, name, arguments.timeout, run, first)
        ledger.complete(report_text, max_batch=largest_batches, paper=PAPER.get(arguments.preset, {}))
    return 1 if ledger.failures() else 0


def search(ledger: Ledger, method: str, timeout_s: float, run: Run, first: int) -> int:
    """Return the largest batch of `method` that fits, or 0 if not even one sequence fits.

    The search begins with `first`.
    """
    info = ledger.run_info
    with tqdm(desc=f"max-batch, {method}", unit="trial") as progress:

        def trial(batch: int) -> BatchTrial:
            order = limited_order(ledger, method, batch) | {"gate": False}
            point = ledger.measure(point_key(method, batch), lambda: run(run_trial, order, timeout_s))
            progress.set_postfix(batch=batch, status=point["status"])
            progress.update()
            fits = point["status"] == Status.MEASURED.value
            return BatchTrial(batch, fits, point.get("static_bytes"), point.get("peak_bytes"))

        return largest(trial, info["limit_bytes"], info["most"], first)


def report_text(ledger: Ledger) -> str:
    """Return the table as Markdown, with the paper's figures if it has the model."""
    info = ledger.run_info
    subject = info["subject"]
    rows = [_row(ledger, method, batch) for method, batch in ledger.summary["max_batch"].items()]
    heading = (
        f"Largest batch of {subject['preset']} with {subject['tokens']} tokens per sequence, {subject['precision']}, "
        f"within {format_bytes(info['limit_bytes'])}"
    )
    return "\n\n".join([heading, markdown_table(rows), *ledger.failures()]) + "\n"


def _row(ledger: Ledger, method: str, batch: int) -> dict[str, str]:
    largest_batches, paper = ledger.summary["max_batch"], ledger.summary["paper"]
    peak: Figures = ledger.points.get(point_key(method, batch), {})
    row = {
        "method": METHODS[method].title,
        "largest batch": f"{batch}{'+' if batch == ledger.run_info['most'] else ''}",
        "peak": format_bytes(peak["peak_bytes"]) if "peak_bytes" in peak else "",
        "x plain": f"{batch / largest_batches['none']:.2f}" if largest_batches.get("none") else "",
    }
    if paper:
        of_plain = f" ({paper[method] / paper['none']:.2f}x)" if method in paper else ""
        row["paper"] = f"{paper.get(method, '')}{of_plain}"
    return row


MAX_GUESSES = 4
"""Maximum number of interpolated guesses. After that, only doubling and bisection follow, which take a bounded number
of trials."""


@dataclass(frozen=True)
class BatchTrial:
    """Result of one trial. Bytes are None if the device ran out of memory before they were counted."""

    batch: int
    fits: bool
    static_bytes: int | None = None
    peak_bytes: int | None = None


def largest(trial: Callable[[int], BatchTrial], limit_bytes: int, most: int, first: int = 1) -> int:
    """Return the largest number from 1 to `most` that fits, or 0 if none fits.

    If a number fits, all smaller numbers must fit too.

    A step's bytes grow nearly in proportion to its batch, so the next trial is the batch whose bytes would reach the
    limit. If the bytes do not grow, because a policy uses its whole budget, the search goes up by 1, 2, 4, ... and then
    bisects.
    """
    fitting, too_large, step, guesses = 0, most + 1, 1, 0
    probe = min(first, most)
    while True:
        last_trial = trial(probe)
        fitting, too_large = (probe, too_large) if last_trial.fits else (fitting, probe)
        if too_large - fitting == 1:
            return fitting
        guess = _batch_at(limit_bytes, last_trial)
        if guess is not None and fitting < guess < too_large and guesses < MAX_GUESSES:
            probe, guesses = guess, guesses + 1
        elif too_large > most or guess == fitting:
            probe, step = min(fitting + step, too_large - 1), 2 * step
        else:
            probe = (fitting + too_large) // 2


def _batch_at(limit_bytes: int, last_trial: BatchTrial) -> int | None:
    """Return the batch size at which the bytes of `last_trial`, scaled in proportion, reach the limit."""
    static_bytes, peak_bytes = last_trial.static_bytes, last_trial.peak_bytes
    if static_bytes is None or peak_bytes is None or peak_bytes <= static_bytes:
        return None
    return last_trial.batch * (limit_bytes - static_bytes) // (peak_bytes - static_bytes)


if __name__ == "__main__":
    sys.exit(main())
