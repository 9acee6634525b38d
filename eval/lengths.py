"""Cost of training on batches of changing sizes: step times, and first steps at a size compared with later steps.

    adacc eval lengths --clock cpu

Small models train on batches that all differ in size. The methods are Adacc at half of plain training's activation
bytes (lossless, and with codecs), HF gradient checkpointing and plain training. The methods take turns on the same
batches. Copies of the methods take turns too, and train on one size, the mean of all sizes. Some sizes recur. Lossless
methods must have the losses of plain training, bit for bit. One model is also trained by the Trainer with the callback.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from adacc_hf.eval.changing_lengths import PART, measure_case
from adacc_hf.eval.length_trainings import TRAINER, TRAINER_MODEL, TRAINER_SCALE, measure_trainings
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, WrongResultError
from adacc_hf.eval.trials.contenders import CHECKPOINTING, PLAIN, ratio_text
from adacc_hf.eval.trials.length_cases import LENGTH_CASES, Scale
from adacc_hf.reports.run_record import Spread, markdown_table

SCALE = Scale()

GOALS = {
    "of_fixed_beside_plain": ("step at new sizes, x the same policy's at the fixed size", 1.05),
    "of_checkpointing": ("step at new sizes, x HF gradient checkpointing's", 1.0),
    "first_of_later_beside_plain": ("first step at a size, x the later ones there", 1.15),
}
"""Goals for Adacc's figures: a description, and the largest accepted value."""


def main(argv: Sequence[str] | None = None, scale: Scale = SCALE, trainer_scale: Scale = TRAINER_SCALE) -> int:
    """Measure every case, print the tables, save record, tables and plot. Return 1 on wrong gradients or losses."""
    parser = runner_parser("lengths", __doc__)
    parser.add_argument("--steps", type=positive_int, help="number of batch sizes (default: 60; Trainer 40)")
    parser.add_argument(
        "--layers", type=positive_int, help=f"layers, but not of the Trainer's model (default: {SCALE.layers})"
    )
    parser.add_argument("--width", type=positive_int, help=f"width of the same models (default: {SCALE.width})")
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=[0.5], help="fractions of plain training's stored bytes"
    )
    names = [*LENGTH_CASES, TRAINER]
    parser.add_argument("--cases", choices=names, nargs="+", default=names, help="cases to train (default: all)")
    arguments, settings = parse(parser, argv, clock=True)
    if not all(0.0 < budget <= 1.0 for budget in arguments.budgets):
        raise ValueError(f"--budgets={arguments.budgets} must be fractions in (0, 1], say 0.5 0.25")
    if arguments.steps:
        scale, trainer_scale = (replace(each_scale, steps=arguments.steps) for each_scale in (scale, trainer_scale))
    scale_options = {name: getattr(arguments, name) for name in ("layers", "width")}
    scale = replace(scale, **{name: number for name, number in scale_options.items() if number})
    options = {name: getattr(arguments, name) for name in ("budgets", "cases", "clock")}
    run_info = {"scale": asdict(scale), "trainer_scale": asdict(trainer_scale), **options}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name in tqdm(arguments.cases, desc="lengths", unit="case"):
            try:
                ledger.measure(name, partial(_measure, ledger, name))
            except WrongResultError as error:
                print(f"adacc eval lengths: {name}: {error}", file=sys.stderr)
                return 1
        ledger.complete(report_text, save_plot, goals=goals_of(_loop_points(ledger)))
    return 0


def _measure(ledger: Ledger, name: str) -> Figures:
    info, settings = ledger.run_info, ledger.settings
    if name == TRAINER:
        scale = Scale(**info["trainer_scale"])
        return measure_trainings(LENGTH_CASES[TRAINER_MODEL], scale, info["budgets"], info["clock"], settings)
    return measure_case(LENGTH_CASES[name], Scale(**info["scale"]), info["budgets"], info["clock"], settings)


def _loop_points(ledger: Ledger) -> dict[str, Figures]:
    """Return the points of all cases except the Trainer's, which has different figures."""
    return {name: point for name, point in ledger.points.items() if name != TRAINER}


def goals_of(points: dict[str, Figures]) -> list[dict[str, Any]]:
    """Return, for each goal, the number of Adacc's methods and cases that meet the goal, and the worst of them."""
    rows = []
    for figure, (goal, limit) in GOALS.items():
        values = {
            f"{LENGTH_CASES[name].title}: {method}": _median(figures[figure])
            for name, point in points.items()
            for method, figures in point["methods"].items()
            if method not in (PLAIN, CHECKPOINTING)
        }
        if values:
            worst_key = max(values, key=lambda key: values[key])
            num_met = sum(value <= limit for value in values.values())
            row = {"goal": goal, "asked": limit, "kept": num_met, "tried": len(values)}
            rows.append({**row, "worst": values[worst_key], "where": worst_key})
    return rows


def _median(figure: float | dict[str, float]) -> float:
    """Return the median of a spread, or the figure itself."""
    return figure["median"] if isinstance(figure, dict) else figure


def report_text(ledger: Ledger) -> str:
    """Return the table of all cases and methods, the goals, the Trainer's table, and explanations of the columns."""
    return "\n\n".join([*_loop_text(ledger), *_trainer_text(ledger)]) + "\n"


def _loop_text(ledger: Ledger) -> Iterator[str]:
    points = _loop_points(ledger)
    if not points:
        return
    scale = Scale(**ledger.run_info["scale"])
    yield (
        f"{scale.steps} batches of {scale.batch} x {scale.shortest} to {scale.longest} tokens, no two of the same "
        f"size; {scale.layers} blocks of width {scale.width}, forward and backward"
    )
    yield markdown_table([row for name, point in points.items() for row in _rows(LENGTH_CASES[name].title, point)])
    yield markdown_table(
        [
            {
                "figure of Adacc": row["goal"],
                "goal": f"{row['asked']:.2f}",
                "met": f"{row['kept']} of {row['tried']}",
                "worst": f"{row['worst']:.2f}",
                "worst case": row["where"],
            }
            for row in ledger.summary["goals"]
        ]
    )
    left_out = {point["left_out"] for point in points.values()}
    yield (
        "Medians, in brackets the 20th to 80th percentile. Ratios to plain and to checkpointing are of medians over "
        "the same batches, their brackets of single batches. The fixed size is the mean of the others; the first step "
        "at a size is compared with three later ones there. In these two columns, plain training has its own ratio, "
        "and the ratios of the other methods are divided by plain training's on the same batches. Methods take turns "
        f"of {PART} new sizes, each after a step at the fixed size that is not timed. Left out before the first new "
        f"size: {', '.join(map(str, sorted(left_out)))} steps at the fixed size, under the same policy."
    )
    yield from _notes(points)


def _rows(title: str, point: Figures) -> Iterator[dict[str, str]]:
    for method, row in point["methods"].items():
        is_plain = method == PLAIN
        fixed = f"{row['of_fixed']:.2f}" if is_plain else ratio_text(row, "of_fixed_beside_plain", "turn")
        yield {
            "model": title,
            "method": method,
            "step, ms": Spread(**row["step_ms"]).text(1),
            "x plain": "1" if is_plain else ratio_text(row, "of_plain", "step"),
            "x checkpointing": "1" if method == CHECKPOINTING else ratio_text(row, "of_checkpointing", "step"),
            "x its fixed size": fixed,
            "first step x later": _spread(row["first_of_later" if is_plain else "first_of_later_beside_plain"]),
            "stored": f"{row['stored_of_plain']:.0%}",
        }


def _spread(figure: dict[str, float]) -> str:
    return Spread(**figure).text(2)


def _notes(points: dict[str, Figures]) -> Iterator[str]:
    """Yield notes: the blocks that cannot be replayed, with the reasons, and the infeasible budgets."""
    for name, point in points.items():
        reasons: dict[str, int] = {}
        for row in point["methods"].values():
            reasons |= row.get("fallbacks", {})
        for reason, count in reasons.items():
            blocks = "1 block cannot" if count == 1 else f"{count} blocks cannot"
            yield f"{LENGTH_CASES[name].title}: {blocks} be replayed: {reason}."
        for method, reason in point["skipped"].items():
            yield f"{LENGTH_CASES[name].title}, {method}: {reason}"


def _trainer_text(ledger: Ledger) -> Iterator[str]:
    point = ledger.points.get(TRAINER)
    if point is None:
        return
    scale = Scale(**ledger.run_info["trainer_scale"])
    yield (
        f"{LENGTH_CASES[TRAINER_MODEL].title}, by the Trainer with its optimizer: {scale.steps} batches of "
        f"{scale.batch} x {scale.shortest} to {scale.longest} tokens, no two of the same size; the first "
        f"{point['left_out']} steps are left out"
    )
    yield markdown_table(
        [
            {
                "method": method,
                "mean step, ms": f"{row['mean_ms']:.1f}",
                "x plain": f"{row['mean_of_plain']:.2f}",
                "x checkpointing": f"{row['mean_of_checkpointing']:.2f}",
                "single steps, x plain": _spread(row["of_plain_by_step"]),
                "x checkpointing, single": _spread(row["of_checkpointing_by_step"]),
                "policy after step": "" if row["policy_step"] is None else str(row["policy_step"]),
                "policies": str(row["num_policies"] or ""),
            }
            for method, row in point["trainings"].items()
        ]
    )


def save_plot(ledger: Ledger) -> None:
    """Plot the time of the first step at each size over plain training's: the median of the models."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for point in _loop_points(ledger).values():
        plain_ms = point["methods"][PLAIN]["steps_ms"]
        for method, row in point["methods"].items():
            if method == PLAIN:
                continue
            by_tokens = ratios.setdefault(method, {})
            for size, ms, base in zip(point["sizes"], row["steps_ms"], plain_ms, strict=True):
                by_tokens.setdefault(size[0], []).append(ms / base)
    series = {
        method: [(tokens, statistics.median(values)) for tokens, values in by_tokens.items()]
        for method, by_tokens in ratios.items()
    }
    # Neighbouring lengths are steps far apart in time: a line between them would show noise.
    path = ledger.settings.output.with_suffix(".svg")
    curves(path, series, "tokens of each sequence", "step time, x plain", joined=False, from_zero=True)


if __name__ == "__main__":
    sys.exit(main())
