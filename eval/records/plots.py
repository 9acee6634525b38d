"""Plots of records, one file each, by matplotlib."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]


def curves(
    path: Path,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    out_of_memory: Mapping[str, Sequence[float]] | None = None,
    line: str = "-",
    diagonal: bool = False,
) -> None:
    """Plot one line with markers per series.

    `out_of_memory` has, by series, the x values at which memory ran out. A cross on the x axis marks each of them. If
    `line` is "", the points are not joined. With `diagonal`, the line y = x is drawn. Without matplotlib, print how to
    draw the plot later from the record.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"{path} was not drawn, because matplotlib is not installed: pip install 'adacc-hf[plot]', and run the "
            "same command with --resume, which draws it from the record",
            file=sys.stderr,
        )
        return
    # pyplot has global state, so it is not used. The non-interactive backend needs no display.
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    missing = out_of_memory or {}
    for number, name in enumerate(dict.fromkeys([*series, *missing])):
        color = f"C{number % 10}"
        marker = "osD^v<>P*h"[number % 10]
        points = sorted(series.get(name, []))
        axes.plot(*zip(*points, strict=True) if points else ((), ()), line, marker=marker, color=color, label=name)
        for x in missing.get(name, []):
            axes.plot([x], [0.02 + 0.03 * number], "x", color=color, transform=axes.get_xaxis_transform())
    if diagonal:
        most = max((x for points in series.values() for x, _ in points), default=1.0)
        axes.plot([0, most], [0, most], "-", color="gray", linewidth=0.8)
    if missing:
        axes.plot([], [], "x", color="gray", label="out of memory")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    # Text stays searchable, and the file is equal from run to run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "adacc"}):
        figure.savefig(path, metadata={"Date": None})
