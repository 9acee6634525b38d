"""Validation losses of a small LLaMA trained by AdamW, GaLore, APOLLO, and CompAct with and without Adacc.

    adacc eval compact-training

All methods train the same model with the Trainer, on the standard library's text. Each seed has its own weights and
data, equal for all methods. Each method tries multiples of a base learning rate: the papers' for GaLore, APOLLO and
CompAct (0.01), and 0.003 for AdamW. The table shows the rate with the least mean loss. GaLore and APOLLO come with `pip
install 'adacc-hf[peers]'`. If they are missing, their rows give this reason.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.repository.low_rank import METHODS, LlamaShape
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.training import ByteSequences, logged, read_text
from adacc_hf.reports.run_record import markdown_table
from adacc_hf.torch_glue.memory import MemoryMeter, static_bytes

METHOD_NAMES = ("plain", "galore", "apollo", "compact_2", "compact_4", "compact_4_adacc")
RATES = (0.1, 0.3, 1.0, 3.0)
"""Multiples of a method's base learning rate that are tried."""


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Train by every method, print the table, save record, table and plot. Return 1 if a training failed."""
    parser = runner_parser("compact-training", __doc__)
    parser.add_argument("--methods", nargs="+", choices=METHOD_NAMES, default=list(METHOD_NAMES))
    parser.add_argument("--steps", type=positive_int, default=TextScale.steps)
    parser.add_argument("--seeds", type=positive_int, default=2, help="number of seeds for each method and rate")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="multiples of learning rates")
    arguments, settings = parse(parser, argv)
    scale = replace(TextScale(), steps=arguments.steps, eval_every=min(TextScale.eval_every, arguments.steps))
    seeds = [settings.seed + number for number in range(arguments.seeds)]
    rates = {name: [METHODS[name].rate * multiple for multiple in arguments.rates] for name in arguments.methods}
    run_info = {"scale": asdict(scale), "methods": arguments.methods, "rates": rates, "seeds": seeds}
    points = {}
    for method, rate, seed in [(name, rate, seed) for seed in seeds for name in rates for rate in rates[name]]:
        order = {"scale": asdict(scale), "method": method, "rate": rate, "seed": seed, "threads": settings.threads}
        points[point_name(method, rate, seed)] = partial(run, train_on_text, order, None)
    ledger = run_points(settings, run_info, arguments.resume, lambda _: points, report_text, save_plot)
    return 1 if ledger.has_status(Status.ERROR) else 0


def point_name(method: str, rate: float, seed: int) -> str:
    """Return the key of a training in the record."""
    return f"{method}, rate {rate:g}, seed {seed}"


@dataclass(frozen=True)
class BestRate:
    """Trainings of one method at its best learning rate."""

    rate: float
    points: list[Figures]
    """Points of the trainings, one for each seed."""
    mean: float | None
    """Mean of the last losses. None if a training has no finite loss."""
    other_means: list[float | None]
    """Mean losses at the other rates, in their order."""


def best_rate_of(ledger: Ledger, method: str) -> BestRate:
    """Return the trainings of `method` at the rate with the least mean loss after the last step."""
    rates, seeds = ledger.run_info["rates"][method], ledger.run_info["seeds"]
    points_by_rate = {rate: [ledger.points[point_name(method, rate, seed)] for seed in seeds] for rate in rates}
    means = {rate: _mean_loss(points) for rate, points in points_by_rate.items()}
    best = min(rates, key=lambda rate: math.inf if (mean := means[rate]) is None else mean)
    return BestRate(best, points_by_rate[best], means[best], [means[rate] for rate in rates if rate != best])


def _mean_loss(points: Sequence[Figures]) -> float | None:
    losses = [_last_loss(point) for point in points]
    finite_losses = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return statistics.mean(finite_losses) if len(finite_losses) == len(losses) else None


def _last_loss(point: Figures) -> float | None:
    return point["curve"][-1][1] if "curve" in point else None


def report_text(ledger: Ledger) -> str:
    """Return the table as Markdown: losses after the last step, their mean, and its difference from AdamW's."""
    info = ledger.run_info
    scale = TextScale(**info["scale"])
    best_rates = {name: best_rate_of(ledger, name) for name in info["methods"]}
    base = best_rates["plain"].mean if "plain" in best_rates else None
    rows = [_row(METHODS[name].title, best, base, info["seeds"]) for name, best in best_rates.items()]
    points = [point for best in best_rates.values() for point in best.points]
    parameters = next((point["parameters"] for point in points if "parameters" in point), 0)
    heading = (
        f"Validation loss (nats per byte) of a byte-level LLaMA of {parameters / 1e6:.1f} million parameters (width "
        f"{scale.width}, {scale.layers} blocks) on the standard library's text after {scale.steps} steps of "
        f"{scale.batch} x {scale.tokens} bytes, float32, seeds {', '.join(map(str, info['seeds']))}; the last tenth of "
        f"the text is held out. Learning rates have a warm-up of a tenth and a cosine schedule. Each row shows the "
        f"best rate of its method, and the mean losses at the other rates. Peaks are live bytes of a whole step"
    )
    reasons = dict.fromkeys(
        f"{METHODS[name].title}: {point['reason']}"
        for name, best in best_rates.items()
        for point in best.points
        if "reason" in point
    )
    return "\n\n".join([heading, markdown_table(rows), *reasons]) + "\n"


def _row(title: str, best: BestRate, base: float | None, seeds: Sequence[int]) -> dict[str, str]:
    losses = {
        f"seed {seed}": point["status"].replace("_", " ") if (loss := _last_loss(point)) is None else f"{loss:.4f}"
        for seed, point in zip(seeds, best.points, strict=True)
    }
    mean, has_mean = best.mean, best.mean is not None
    return {
        "method": title,
        "rate": f"{best.rate:g}" if has_mean else "",
        **losses,
        "mean": "" if mean is None else f"{mean:.4f}",
        "over AdamW's": "" if mean is None or base is None else f"{mean - base:+.4f}",
        "at other rates": ", ".join("none" if m is None else f"{m:.4f}" for m in best.other_means) if has_mean else "",
        "peak": format_bytes(max(point["peak_bytes"] for point in best.points)) if has_mean else "",
    }


def save_plot(ledger: Ledger) -> None:
    """Plot the mean of the seeds' validation losses over the steps."""
    series = {}
    for name in ledger.run_info["methods"]:
        best = best_rate_of(ledger, name)
        if best.mean is not None:
            loss_curves = [point["curve"] for point in best.points]
            series[METHODS[name].title] = [
                (points_of_step[0][0], statistics.mean(loss for _, loss in points_of_step))
                for points_of_step in zip(*loss_curves, strict=True)
            ]
    curves(ledger.settings.output.with_suffix(".svg"), series, "step", "validation loss, nats per byte")


MEASURED_STEP = 30
"""Step whose peak is measured. By this step, Adacc has its policy. No method draws a new subspace in this step."""


@dataclass(frozen=True, kw_only=True)
class TextScale(LlamaShape):
    """Sizes of the model and its training."""

    width: int = 192
    inner: int = 512
    layers: int = 4
    heads: int = 4
    vocabulary: int = 256
    batch: int = 8
    tokens: int = 64
    steps: int = 1000
    eval_every: int = 200
    eval_sequences: int = 128


class StepPeak(TrainerCallback):
    """Callback that measures the live bytes of the `step`-th step of a Trainer, optimizer included."""

    def __init__(self, step: int) -> None:
        self.peak_bytes = 0
        self._step = step
        self._meter: MemoryMeter | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any):
        if state.global_step + 1 == self._step:
            self._live_bytes = static_bytes(model, {}, optimizer)
            self._meter = MemoryMeter.for_device(next(model.parameters()).device)
            self._meter.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.peak_bytes, self._meter = self._live_bytes + self._meter.peak_bytes, None


def train_on_text(scale: Figures, method: str, rate: float, seed: int, threads: int = 1) -> Figures:
    """Train once. Return the validation losses [(step, loss)], the peak bytes of one step, and the number of
    parameters."""
    torch.set_num_threads(threads)
    text_scale = TextScale(**scale)
    training, validation = read_text(None, text_scale.tokens)
    peak = StepPeak(min(MEASURED_STEP, text_scale.steps))
    model = text_scale.model(seed)
    # All seeds use the same held-out sequences.
    held_out = ByteSequences(validation, text_scale.tokens, text_scale.eval_sequences, 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = METHODS[method].trainer(
            model,
            folder,
            data=ByteSequences(training, text_scale.tokens, text_scale.steps * text_scale.batch, seed),
            held_out=held_out,
            callbacks=[peak],
            learning_rate=rate,
            **_arguments(text_scale, seed),
        )
        trainer.train()
    return {
        "curve": logged(trainer, "eval_loss"),
        "peak_bytes": peak.peak_bytes,
        "parameters": sum(p.numel() for p in text_scale.model(seed).parameters()),
    }


def _arguments(scale: TextScale, seed: int) -> dict[str, Any]:
    return {
        "max_steps": scale.steps,
        "per_device_train_batch_size": scale.batch,
        "per_device_eval_batch_size": 32,
        "lr_scheduler_type": "cosine",
        "warmup_steps": scale.steps // 10,
        "eval_strategy": "steps",
        "eval_steps": scale.eval_every,
        "logging_steps": scale.eval_every,
        "save_strategy": "no",
        "seed": seed,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }


if __name__ == "__main__":
    sys.exit(main())
