"""Memory and step time of CompAct, compared with AdamW, GaLore and Adacc, and with the peaks of CompAct's paper.

    adacc eval compact

Memory is counted in live bytes over whole steps, optimizer included, on the LLaMA shapes of GaLore's and CompAct's
papers. If a CPU cannot hold all blocks, fewer are used. The peaks of the whole models at the paper's setting are
predicted by `adacc plan`. Adacc runs with AdamW. Its budget is the peak of CompAct with a rank of a quarter of the
inputs. Steps are timed in turn. GaLore comes with `pip install 'adacc-hf[peers]'`. If GaLore is missing, its rows give
this reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.repository.low_rank import ADACC, METHODS, LlamaShape, measure_shape, time_steps
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.reports.run_record import Spread, markdown_table

SHAPES = {
    "60M": LlamaShape(width=512, inner=1376, layers=8, heads=8),
    "130M": LlamaShape(width=768, inner=2048, layers=12, heads=12),
    "350M": LlamaShape(width=1024, inner=2736, layers=24, heads=16),
    "1B": LlamaShape(width=2048, inner=5461, layers=24, heads=32),
}
CUTS = {"60M": (8, 2), "130M": (4, 2), "350M": (2, 1), "1B": (1, 1)}
"""Numbers of blocks and sequences of a measured step, so small that one CPU thread takes only seconds."""
MEASURED = ("plain", "galore", "galore_layerwise", "compact_2", "compact_4", "compact_8", ADACC, "compact_4_adacc")
PLANNED = ("plain", "compact_2", "compact_4", "compact_8")
PEER = "compact_4"
"""Method whose peak is Adacc's budget."""
TITLES = {**{name: METHODS[name].title for name in METHODS}, ADACC: "AdamW with Adacc, at the peak of CompAct n/4"}

PAPER_GIB: dict[str, dict[str, float]] = {
    "60M": {"plain": 11.59, "compact_2": 11.32, "compact_4": 10.80, "compact_8": 10.54},
    "130M": {"plain": 18.66, "compact_2": 17.97, "compact_4": 16.78, "compact_8": 16.19},
    "350M": {"plain": 39.97, "compact_2": 37.94, "compact_4": 34.71, "compact_8": 33.03},
    "1B": {"compact_2": 72.82, "compact_4": 65.57, "compact_8": 61.88},
}
"""Peaks of pretraining in GiB, from the paper. For AdamW at 1B, the paper says "above 81"."""
PAPER_BATCH = 64
"""Sequences of 256 tokens. The paper's text gives no batch for its peaks. The authors' script for 1B has 64."""
TIMED = ("plain", "galore", "compact_2", "compact_4", "compact_8", "compact_4_adacc")
TIMED_SHAPE = LlamaShape(width=256, inner=688, layers=6, heads=4, vocabulary=512, batch=4, tokens=256)


def main(argv: Sequence[str] | None = None, run: Callable[..., Figures] = run_isolated) -> int:
    """Measure, print the tables, save record, tables and plot. Return 1 if a measurement failed."""
    parser = runner_parser("compact", __doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="LLaMA shapes (default: all)"
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="timed rounds")
    arguments, settings = parse(parser, argv, clock=True)
    run_info = {
        "shapes": {name: asdict(SHAPES[name]) for name in arguments.shapes},
        "cuts": {name: CUTS[name] for name in arguments.shapes},
        "plan_batch": PAPER_BATCH,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        "timed": asdict(TIMED_SHAPE),
    }

    def points(ledger: Ledger) -> dict[str, Callable[[], Figures]]:
        shapes = {name: partial(run, measure_shape, shape_order(ledger, name), None) for name in arguments.shapes}
        return {"time": partial(run, time_steps, time_order(ledger), None), **shapes}

    def summary(ledger: Ledger) -> dict[str, Any]:
        return {"paper_gib": PAPER_GIB}

    ledger = run_points(settings, run_info, arguments.resume, points, report_text, save_plot, summary)
    return 1 if ledger.has_status(Status.ERROR) else 0


def time_order(ledger: Ledger) -> dict[str, Any]:
    info = ledger.run_info
    order = {"shape": info["timed"], "methods": list(TIMED), "peer": PEER, "rounds": info["rounds"]}
    return order | {"clock": info["clock"], "seed": ledger.settings.seed, "threads": ledger.settings.threads}


def shape_order(ledger: Ledger, name: str) -> dict[str, Any]:
    layers, batch = ledger.run_info["cuts"][name]
    parts = {method: METHODS[method].part if METHODS[method].is_compact else None for method in PLANNED}
    order = {"shape": ledger.run_info["shapes"][name], "layers": layers, "batch": batch, "methods": list(MEASURED)}
    shared = {"seed": ledger.settings.seed, "threads": ledger.settings.threads}
    return order | {"peer": PEER, "parts": parts, "plan_batch": PAPER_BATCH, **shared}


def report_text(ledger: Ledger) -> str:
    """Return three tables as Markdown: memory, predictions next to the paper's peaks, and times."""
    info = ledger.run_info
    shapes = {name: ledger.points[name] for name in info["shapes"] if "memory" in ledger.points[name]}
    cuts = ", ".join(
        f"{name}: {info['cuts'][name][0]} of {SHAPES[name].layers}, {info['cuts'][name][1]}" for name in shapes
    )
    parts = [
        f"Peak of live bytes in a step (forward, backward, optimizer) of LLaMA shapes with a vocabulary of 32,000, in "
        f"float32. Blocks and sequences of 256 tokens are as many as a CPU trains ({cuts}). In parentheses: live bytes "
        f"between steps. Steps in which GaLore computes its subspaces are left out",
        _memory_table(shapes),
        f"Peaks of the whole models that `adacc plan` predicts in float32, {PAPER_BATCH} x 256 tokens, in GiB, and the "
        f"paper's peaks. Each layer has its own projection of CompAct, as in the paper; in the last column, layers "
        f"with the same input share one, as in this package",
        _plan_table(shapes),
        "The paper's peaks agree with float32. The authors' scripts ask for bfloat16 weights, with which AdamW's are "
        + ", ".join(_half(name, point) for name, point in shapes.items()),
    ]
    timed = ledger.points["time"]
    if timed["status"] == Status.MEASURED.value:
        shape = LlamaShape(**info["timed"])
        parts += [
            f"Times of whole steps, alternating in {info['rounds']} rounds, by the {info['clock']} clock: width "
            f"{shape.width}, {shape.layers} blocks, vocabulary {shape.vocabulary}, {shape.batch} x {shape.tokens} "
            f"tokens, float32; in parentheses the 20th and 80th percentile",
            markdown_table([_time_cells(name, timed[name]) for name in (*TIMED, ADACC) if name in timed]),
        ]
    reasons = {key: point for key, point in ledger.points.items() if "reason" in point}
    reasons |= {
        f"{name}, {TITLES[method]}": method_figures
        for name, point in shapes.items()
        for method, method_figures in point["memory"].items()
        if "reason" in method_figures
    }
    parts += [f"{key}: {point['reason']}" for key, point in reasons.items()]
    return "\n\n".join(parts) + "\n"


def _memory_table(shapes: dict[str, Figures]) -> str:
    return markdown_table(
        [
            {"method": TITLES[method], **{name: _memory_cell(p["memory"][method]) for name, p in shapes.items()}}
            for method in MEASURED
        ]
    )


def _memory_cell(point: Figures) -> str:
    if "peak_bytes" not in point:
        return point["status"].replace("_", " ")
    return f"{format_bytes(point['peak_bytes'])} ({format_bytes(point['static_bytes'])})"


def _plan_table(shapes: dict[str, Figures]) -> str:
    rows = []
    for name, point in shapes.items():
        for method, prediction in point["plans"].items():
            paper = PAPER_GIB[name].get(method)
            gib = prediction["peak_bytes"] / 2**30
            rows.append(
                {
                    "model": f"{name}, {TITLES[method]}",
                    "predicted": f"{gib:.2f}",
                    "paper": "above 81" if paper is None else f"{paper:.2f}",
                    "error": "" if paper is None else f"{100 * (gib / paper - 1):+.1f} %",
                    "predicted, shared": f"{prediction['shared_peak_bytes'] / 2**30:.2f}",
                }
            )
    return markdown_table(rows)


def _half(name: str, point: Figures) -> str:
    return f"{point['bf16_plan']['peak_bytes'] / 2**30:.2f} GiB ({name})"


def _time_cells(name: str, row: Figures) -> dict[str, str]:
    ratio_with_drawing = row["of_plain"]
    if "drawing_ms" in row:
        median, gap = row["step_ms"]["median"], row["drawing_gap"]
        ratio_with_drawing *= (median * (gap - 1) + row["drawing_ms"]) / gap / median
    return {
        "method": TITLES[name],
        "step, ms": Spread(**row["step_ms"]).text(0),
        "x AdamW": f"{row['of_plain']:.2f} "
        f"({row['of_plain_by_round']['low']:.2f} to {row['of_plain_by_round']['high']:.2f})",
        "x AdamW, subspace updates included": f"{ratio_with_drawing:.2f}",
        "peak": format_bytes(row["peak_bytes"]),
    }


def save_plot(ledger: Ledger) -> None:
    """Plot the measured peaks over AdamW's, by width."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in ledger.run_info["shapes"]:
        memory = ledger.points[name].get("memory", {})
        peaks = {method: point["peak_bytes"] for method, point in memory.items() if "peak_bytes" in point}
        for method, peak in peaks.items():
            if method != "plain":
                series.setdefault(TITLES[method], []).append((SHAPES[name].width, peak / peaks["plain"]))
    curves(ledger.settings.output.with_suffix(".svg"), series, "width of the model", "peak, x AdamW's", from_zero=True)


if __name__ == "__main__":
    sys.exit(main())
