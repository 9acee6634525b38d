"""Plots of records, one file each; needs matplotlib."""

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
    """Write one line with markers per series; `out_of_memory` names the x where a series has no point for that reason.

    A crossed marker on the x axis stands for such a place. With `line` "" the points are not joined, and with
    `diagonal` a line shows where y equals x. Without matplotlib it says so: the record has the points.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"{path} was not drawn, for want of matplotlib: pip install 'adacc-hf[plot]'; the same command with "
            "--resume draws it from the record",
            file=sys.stderr,
        )
        return
    # Not pyplot, whose state would outlive the call; the non-interactive backend needs no display.
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
    # Text that can be read and searched, and nothing in the file that changes from run to run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "adacc"}):
        figure.savefig(path, metadata={"Date": None})
