"""Fine-tuning of a small RoBERTa: AdamW on all weights, LoRA, GaLore and CompAct; accuracy, peak and time of a step.

    adacc eval compact-tuning

The model has learnt to tell which of twelve packages of the standard library a passage of 63 words and signs is from,
and is tuned to tell six others apart. Each method tries multiples of a learning rate, and the best is shown. Steps are
timed within each training. GaLore comes with `pip install 'adacc-hf[peers]'`, LoRA with PEFT.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.clock import add_clock, check_clock
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.low_rank import add_trainings, best_rate, point_name, rates_of
from adacc_hf.eval.trials.low_rank_tuning import EARLIER, PACKAGES, TUNINGS, TuningScale, pretrain, tune

PRETRAINING = "pretraining"


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Tune by every method, print the table, save it and the record. Returns 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="adacc eval compact-tuning", description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=tuple(TUNINGS), default=list(TUNINGS))
    parser.add_argument("--steps", type=positive_int, default=TuningScale.steps, help="of tuning")
    parser.add_argument("--pretraining-steps", type=positive_int, default=TuningScale.pretraining_steps)
    add_trainings(parser)
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "compact_tuning")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    scale = replace(TuningScale(), steps=arguments.steps, pretraining_steps=arguments.pretraining_steps)
    seeds = [settings.seed + number for number in range(arguments.seeds)]
    rates = rates_of({method: TUNINGS[method][0] for method in arguments.methods}, arguments.rates)
    run_info = {"scale": asdict(scale), "methods": arguments.methods, "rates": rates, "seeds": seeds}
    run_info["clock"] = arguments.clock
    # The model lies beside the record, which may go on with it.
    shared: dict[str, Any] = {"scale": asdict(scale), "folder": str(settings.output.with_suffix("").resolve())}
    shared["threads"] = settings.threads
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        ledger.measure(PRETRAINING, partial(run, pretrain, shared | {"seed": settings.seed}, None))
        keys = [(method, rate, seed) for seed in seeds for method in arguments.methods for rate in rates[method]]
        for method, rate, seed in tqdm(keys, desc="compact-tuning", unit="training"):
            order = shared | {"method": method, "rate": rate, "seed": seed, "clock": arguments.clock}
            ledger.measure(point_name(method, rate, seed), partial(run, tune, order, None))
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 1 if any(point["status"] == Status.ERROR.value for point in ledger.points.values()) else 0


def report_text(ledger: Ledger) -> str:
    """The table as Markdown."""
    info = ledger.run_info
    scale = TuningScale(**info["scale"])
    earlier = ledger.points[PRETRAINING].get("accuracy", 0.0)
    heading = (
        f"Accuracy at telling which of {len(PACKAGES)} packages of the standard library a held-out passage of "
        f"{scale.tokens - 1} words and signs is from ({scale.eval_passages} passages; chance is "
        f"{1 / len(PACKAGES):.3f}), by a RoBERTa of width {scale.width} and {scale.layers} blocks that has learnt to "
        f"tell {len(EARLIER)} others apart ({earlier:.3f} of such passages), after {scale.steps} steps of "
        f"{scale.batch} passages, float32. Of the learning rates tried by each method the best is shown, and what the "
        f"others came to. Peaks are live bytes of a whole step; times, by the {info['clock']} clock, are medians of "
        f"steps of separate trainings"
    )
    rows = [_row(ledger, method) for method in info["methods"]]
    reasons = dict.fromkeys(point["reason"] for point in ledger.points.values() if "reason" in point)
    return "\n\n".join([heading, markdown_table(rows), *reasons]) + "\n"


def _row(ledger: Ledger, method: str) -> dict[str, str]:
    info = ledger.run_info
    one = best_rate(ledger.points, method, info["rates"][method], info["seeds"], _accuracy, is_loss=False)
    is_known = one.mean is not None
    return {
        "method": TUNINGS[method][0].title,
        "rate": f"{one.rate:g}" if is_known else "",
        **{
            f"seed {seed}": f"{point['accuracy']:.3f}" if "accuracy" in point else point["status"].replace("_", " ")
            for seed, point in zip(info["seeds"], one.points, strict=True)
        },
        "mean": f"{one.mean:.3f}" if is_known else "",
        "at other rates": one.other_means(3) if is_known else "",
        "trained numbers": f"{one.points[0]['trained']:,}" if is_known else "",
        "peak": format_bytes(one.points[0]["peak_bytes"]) if is_known else "",
        "step, ms": " and ".join(f"{point['step_ms']['median']:.0f}" for point in one.points) if is_known else "",
    }


def _accuracy(point: Figures) -> float | None:
    return point.get("accuracy")


if __name__ == "__main__":
    sys.exit(main())
