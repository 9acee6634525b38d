"""Validation loss of a small LLaMA on the standard library's text: AdamW, GaLore, APOLLO, CompAct, and it with Adacc.

    adacc eval compact-training

Every method trains the same model by the Trainer, twice: each seed has weights and data of its own, and all methods
have the same. Learning rates are those of the papers for GaLore, APOLLO and CompAct (0.01), and 0.003 for AdamW. GaLore
and APOLLO come with `pip install 'adacc-hf[peers]'`; without them their rows say so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.low_rank import METHODS
from adacc_hf.eval.trials.low_rank_training import TextScale, train_on_text

TRAINED = ("plain", "galore", "apollo", "compact_2", "compact_4", "compact_4_adacc")


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Train by every method, print the table, save record, table and plot. Returns 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="adacc eval compact-training", description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--steps", type=positive_int, default=TextScale.steps)
    parser.add_argument("--seeds", type=positive_int, default=2, help="trainings of each method")
    add_resume(parser)
    add_settings(parser, "compact_training")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    scale = replace(TextScale(), steps=arguments.steps, eval_every=min(TextScale.eval_every, arguments.steps))
    seeds = [settings.seed + number for number in range(arguments.seeds)]
    run_info = {"scale": asdict(scale), "methods": arguments.methods, "seeds": seeds}
    keys = [(method, seed) for seed in seeds for method in arguments.methods]
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for method, seed in tqdm(keys, desc="compact-training", unit="training"):
            order = {"scale": asdict(scale), "method": method, "seed": seed, "threads": settings.threads}
            ledger.measure(f"{method}, seed {seed}", partial(run, train_on_text, order, None))
        ledger.finish()
        save_plot(ledger)
        ledger.publish(report_text(ledger))
    failed = [point for point in ledger.points.values() if point["status"] == Status.ERROR.value]
    return 1 if failed else 0


def of_method(ledger: Ledger, method: str) -> list[Figures]:
    """The points of one method, by seed."""
    return [ledger.points[f"{method}, seed {seed}"] for seed in ledger.run_info["seeds"]]


def report_text(ledger: Ledger) -> str:
    """The table as Markdown: losses after the last step, their mean and how far it is from AdamW's."""
    info = ledger.run_info
    scale = TextScale(**info["scale"])
    measured = {
        name: [p for p in of_method(ledger, name) if p["status"] == Status.MEASURED.value] for name in info["methods"]
    }
    plain = measured.get("plain")
    base = _mean(plain) if plain else None
    rows = [_row(name, measured[name], base, info["seeds"], of_method(ledger, name)) for name in info["methods"]]
    parameters = next((point["parameters"] for points in measured.values() for point in points), 0)
    heading = (
        f"Validation loss (nats per byte) of a byte-level LLaMA of {parameters / 1e6:.1f} million parameters (width "
        f"{scale.width}, {scale.layers} blocks) on the standard library's text after {scale.steps} steps of "
        f"{scale.batch} x {scale.tokens} bytes, float32, seeds {', '.join(map(str, info['seeds']))}; the last tenth of "
        f"the text is held out. AdamW's learning rate is {METHODS['plain'].rate:g}, that of the others "
        f"{METHODS['compact_4'].rate:g}, as in their papers, each with a warm-up of a tenth and a cosine; none was "
        f"tuned here, by which AdamW may lose most. Peaks are live bytes of a whole step"
    )
    reasons = dict.fromkeys(
        f"{METHODS[name].title}: {point['reason']}"
        for name in info["methods"]
        for point in of_method(ledger, name)
        if "reason" in point
    )
    return "\n\n".join([heading, markdown_table(rows), *reasons]) + "\n"


def _row(name: str, points: Sequence[Figures], base: float | None, seeds: Sequence[int], all_points) -> dict[str, str]:
    losses = {
        f"seed {seed}": f"{point['curve'][-1][1]:.4f}" if "curve" in point else point["status"].replace("_", " ")
        for seed, point in zip(seeds, all_points, strict=True)
    }
    mean = _mean(points) if points else None
    return {
        "method": METHODS[name].title,
        **losses,
        "mean": "" if mean is None else f"{mean:.4f}",
        "over AdamW's": "" if mean is None or base is None else f"{mean - base:+.4f}",
        "peak": format_bytes(max(point["peak_bytes"] for point in points)) if points else "",
    }


def _mean(points: Sequence[Figures]) -> float:
    return statistics.mean(point["curve"][-1][1] for point in points)


def save_plot(ledger: Ledger) -> None:
    """The mean of the seeds' validation losses over the steps."""
    series = {}
    for name in ledger.run_info["methods"]:
        found = [point["curve"] for point in of_method(ledger, name) if "curve" in point]
        if found:
            series[METHODS[name].title] = [
                (places[0][0], statistics.mean(loss for _, loss in places)) for places in zip(*found, strict=True)
            ]
    curves(ledger.settings.output.with_suffix(".svg"), series, "step", "validation loss, nats per byte")


if __name__ == "__main__":
    sys.exit(main())
