"""Fine-tuning of a small RoBERTa: AdamW on all weights, LoRA, GaLore and CompAct; accuracy, peak and time of a step.

    adacc eval compact-tuning

The model learns to fill in bytes of the standard library's text, and is tuned to tell which package a passage of 128
bytes is from. Steps are timed within each training. GaLore comes with `pip install 'adacc-hf[peers]'`, LoRA with PEFT.
"""

from __future__ import annotations

import argparse
import statistics
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
from adacc_hf.eval.trials.low_rank_tuning import PACKAGES, TUNINGS, TuningScale, pretrain, tune

PRETRAINING = "pretraining"


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Tune by every method, print the table, save it and the record. Returns 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="adacc eval compact-tuning", description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=tuple(TUNINGS), default=list(TUNINGS))
    parser.add_argument("--steps", type=positive_int, default=TuningScale.steps, help="of tuning")
    parser.add_argument("--pretraining-steps", type=positive_int, default=TuningScale.pretraining_steps)
    parser.add_argument("--seeds", type=positive_int, default=2, help="trainings of each method")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "compact_tuning")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    scale = replace(TuningScale(), steps=arguments.steps, pretraining_steps=arguments.pretraining_steps)
    seeds = [settings.seed + number for number in range(arguments.seeds)]
    run_info = {"scale": asdict(scale), "methods": arguments.methods, "seeds": seeds, "clock": arguments.clock}
    # The model lies beside the record, which may go on with it.
    shared: dict[str, Any] = {"scale": asdict(scale), "folder": str(settings.output.with_suffix("").resolve())}
    shared["threads"] = settings.threads
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        ledger.measure(PRETRAINING, partial(run, pretrain, shared | {"seed": settings.seed}, None))
        keys = [(method, seed) for seed in seeds for method in arguments.methods]
        for method, seed in tqdm(keys, desc="compact-tuning", unit="training"):
            order = shared | {"method": method, "seed": seed, "clock": arguments.clock}
            ledger.measure(f"{method}, seed {seed}", partial(run, tune, order, None))
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 1 if any(point["status"] == Status.ERROR.value for point in ledger.points.values()) else 0


def report_text(ledger: Ledger) -> str:
    """The table as Markdown."""
    info = ledger.run_info
    scale = TuningScale(**info["scale"])
    heading = (
        f"Accuracy at telling which of {len(PACKAGES)} packages of the standard library a held-out passage of "
        f"{scale.tokens} bytes is from ({scale.eval_passages} passages; chance is {1 / len(PACKAGES):.3f}), by a "
        f"RoBERTa of width {scale.width} and {scale.layers} blocks that was trained to fill in bytes for "
        f"{scale.pretraining_steps} steps, after {scale.steps} steps of {scale.batch} passages, float32. Peaks are "
        f"live bytes of a whole step; times, by the {info['clock']} clock, are medians of steps of separate trainings"
    )
    rows = [_row(ledger, method) for method in info["methods"]]
    reasons = dict.fromkeys(point["reason"] for point in ledger.points.values() if "reason" in point)
    return "\n\n".join([heading, markdown_table(rows), *reasons]) + "\n"


def _row(ledger: Ledger, method: str) -> dict[str, str]:
    seeds = ledger.run_info["seeds"]
    points = [ledger.points[f"{method}, seed {seed}"] for seed in seeds]
    found = [point for point in points if "accuracy" in point]
    times = [point["step_ms"]["median"] for point in found]
    return {
        "method": TUNINGS[method][0].title,
        **{
            f"seed {seed}": f"{point['accuracy']:.3f}" if "accuracy" in point else point["status"].replace("_", " ")
            for seed, point in zip(seeds, points, strict=True)
        },
        "mean": f"{statistics.mean(point['accuracy'] for point in found):.3f}" if found else "",
        "trained numbers": f"{found[0]['trained']:,}" if found else "",
        "peak": format_bytes(found[0]["peak_bytes"]) if found else "",
        "step, ms": " and ".join(f"{ms:.0f}" for ms in times),
    }


if __name__ == "__main__":
    sys.exit(main())
