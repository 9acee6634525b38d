"""Validation loss of a small LLaMA on the standard library's text: AdamW, GaLore, APOLLO, CompAct, and it with Adacc.

    adacc eval compact-training

Every method trains the same model by the Trainer: each seed has weights and data of its own, and all methods have the
same. Each method tries multiples of a learning rate, which is the papers' for GaLore, APOLLO and CompAct (0.01) and
0.003 for AdamW; shown is the one of the least mean loss. GaLore and APOLLO come with `pip install 'adacc-hf[peers]'`;
without them their rows say so.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.low_rank import METHODS
from adacc_hf.eval.trials.low_rank_training import TextScale, train_on_text

RATES = (0.3, 1.0, 3.0)
TRAINED = ("plain", "galore", "apollo", "compact_2", "compact_4", "compact_4_adacc")


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Train by every method, print the table, save record, table and plot. Returns 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="adacc eval compact-training", description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--steps", type=positive_int, default=TextScale.steps)
    parser.add_argument("--seeds", type=positive_int, default=2, help="trainings of each method")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=list(RATES), help="multiples of learning rates to try"
    )
    add_resume(parser)
    add_settings(parser, "compact_training")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    scale = replace(TextScale(), steps=arguments.steps, eval_every=min(TextScale.eval_every, arguments.steps))
    seeds = [settings.seed + number for number in range(arguments.seeds)]
    rates = {method: [METHODS[method].rate * multiple for multiple in arguments.rates] for method in arguments.methods}
    run_info = {"scale": asdict(scale), "methods": arguments.methods, "rates": rates, "seeds": seeds}
    keys = [(method, rate, seed) for seed in seeds for method in arguments.methods for rate in rates[method]]
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for method, rate, seed in tqdm(keys, desc="compact-training", unit="training"):
            order = {"scale": asdict(scale), "method": method, "rate": rate, "seed": seed, "threads": settings.threads}
            ledger.measure(_key(method, rate, seed), partial(run, train_on_text, order, None))
        ledger.finish()
        save_plot(ledger)
        ledger.publish(report_text(ledger))
    failed = [point for point in ledger.points.values() if point["status"] == Status.ERROR.value]
    return 1 if failed else 0


@dataclass(frozen=True)
class Trained:
    """The trainings of one method at the rate that suits it best, by seed."""

    title: str
    rate: float
    points: list[Figures]
    others: list[float]
    """Mean losses at the other rates, in their order; infinite where a training has none."""

    @property
    def loss(self) -> float | None:
        """The mean of the losses after the last step. None if a training has none."""
        loss = _mean_loss(self.points)
        return loss if math.isfinite(loss) else None


def of_method(ledger: Ledger, method: str) -> Trained:
    """What `method` came to, at the rate of the least mean loss."""
    info = ledger.run_info
    found = {
        rate: [ledger.points[_key(method, rate, seed)] for seed in info["seeds"]] for rate in info["rates"][method]
    }
    best = min(found, key=lambda rate: _mean_loss(found[rate]))
    others = [_mean_loss(points) for rate, points in found.items() if rate != best]
    return Trained(METHODS[method].title, best, found[best], others)


def _key(method: str, rate: float, seed: int) -> str:
    return f"{method}, rate {rate:g}, seed {seed}"


def _mean_loss(points: Sequence[Figures]) -> float:
    if not all("curve" in point for point in points):
        return math.inf
    losses = [point["curve"][-1][1] for point in points]
    return statistics.mean(losses) if all(map(math.isfinite, losses)) else math.inf


def report_text(ledger: Ledger) -> str:
    """The table as Markdown: losses after the last step, their mean and how far it is from AdamW's."""
    info = ledger.run_info
    scale = TextScale(**info["scale"])
    trained = {name: of_method(ledger, name) for name in info["methods"]}
    base = trained["plain"].loss if "plain" in trained else None
    rows = [_row(one, base, info["seeds"]) for one in trained.values()]
    points = [point for one in trained.values() for point in one.points]
    parameters = next((point["parameters"] for point in points if "parameters" in point), 0)
    heading = (
        f"Validation loss (nats per byte) of a byte-level LLaMA of {parameters / 1e6:.1f} million parameters (width "
        f"{scale.width}, {scale.layers} blocks) on the standard library's text after {scale.steps} steps of "
        f"{scale.batch} x {scale.tokens} bytes, float32, seeds {', '.join(map(str, info['seeds']))}; the last tenth of "
        f"the text is held out. Learning rates have a warm-up of a tenth and a cosine; of those tried by each method "
        f"the best is shown, and what the others came to. Peaks are live bytes of a whole step"
    )
    reasons = dict.fromkeys(
        f"{one.title}: {point['reason']}" for one in trained.values() for point in one.points if "reason" in point
    )
    return "\n\n".join([heading, markdown_table(rows), *reasons]) + "\n"


def _row(one: Trained, base: float | None, seeds: Sequence[int]) -> dict[str, str]:
    losses = {
        f"seed {seed}": f"{point['curve'][-1][1]:.4f}" if "curve" in point else point["status"].replace("_", " ")
        for seed, point in zip(seeds, one.points, strict=True)
    }
    return {
        "method": one.title,
        "rate": f"{one.rate:g}" if one.loss is not None else "",
        **losses,
        "mean": "" if one.loss is None else f"{one.loss:.4f}",
        "over AdamW's": "" if one.loss is None or base is None else f"{one.loss - base:+.4f}",
        "at other rates": ", ".join(f"{loss:.4f}" if math.isfinite(loss) else "none" for loss in one.others)
        if one.loss is not None
        else "",
        "peak": "" if one.loss is None else format_bytes(max(point["peak_bytes"] for point in one.points)),
    }


def save_plot(ledger: Ledger) -> None:
    """The mean of the seeds' validation losses over the steps."""
    series = {}
    for name in ledger.run_info["methods"]:
        one = of_method(ledger, name)
        if one.loss is not None:
            curves_found = [point["curve"] for point in one.points]
            series[one.title] = [
                (places[0][0], statistics.mean(loss for _, loss in places))
                for places in zip(*curves_found, strict=True)
            ]
    curves(ledger.settings.output.with_suffix(".svg"), series, "step", "validation loss, nats per byte")


if __name__ == "__main__":
    sys.exit(main())
