"""Plots of records, one SVG file each, by matplotlib. A method has the same colour and marker in every plot.

The background is transparent. Text and axes are grey, so that a plot is readable on light and on dark pages.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#7a818a"
"""Colour of text and axes. The contrast is 4:1 on white and on the dark pages of the site."""

STYLES = {
    "plain": (INK, "s"),
    "HF gradient checkpointing": ("#009E73", "^"),
    "naive quantization": ("#C77C00", "D"),
    "selective checkpointing": ("#8C7335", "P"),
    "xformers": ("#C2649B", "h"),
    "torch.compile": ("#B8558F", "v"),
    "Adacc": ("#1F83C4", "o"),
    "Adacc exact": ("#D55E00", "X"),
    "Adacc w/o outlier": ("#2A939F", "p"),
    "Adacc in torch.compile": ("#8064D6", "*"),
}
"""Colour and marker by the beginning of a series' name, without commas."""
SPARE_STYLES = (("#1F83C4", "o"), ("#D55E00", "X"), ("#009E73", "^"), ("#8064D6", "*"), ("#B8558F", "v"))
"""Colours and markers of series that are not in STYLES, in order of appearance."""


HEADROOM = 1.08
"""Upper end of a vertical axis that starts at 0, as a multiple of the highest point."""


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """Measured point of a plot."""

    x: float
    y: float
    low: float | None = None
    """Lower end of the spread of y."""
    high: float | None = None
    label: str = ""
    """Text next to the point, for example the budget."""


def speed_point(x: float, spread: Mapping[str, float], label: str = "") -> PlotPoint:
    """Return the point of a speed in tokens per second, from the record of its spread."""
    return PlotPoint(x=x, y=spread["median"], low=spread["low"], high=spread["high"], label=label)


Points = Sequence[tuple[float, float] | PlotPoint]


def curves(
    path: Path,
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    out_of_memory: Mapping[str, Sequence[float]] | None = None,
    *,
    joined: bool = True,
    from_zero: bool = False,
    diagonal: bool = False,
) -> None:
    """Plot one curve per series. Without matplotlib, print how to draw the plot later from the record.

    Args:
        out_of_memory: x of the points that ran out of memory, by series. A cross on the x axis marks each of them.
        joined: join the points of a series by lines. Leave it False where neighbouring points differ by noise.
        from_zero: start the vertical axis at 0.
        diagonal: draw the line y = x, on logarithmic axes.
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

    colored = ("text.color", "xtick.color", "ytick.color", "grid.color", "axes.edgecolor", "axes.labelcolor")
    # Text stays searchable, and the file is equal from run to run.
    settings: dict[Any, Any] = {**dict.fromkeys(colored, INK), "svg.fonttype": "none", "svg.hashsalt": "adacc"}
    with rc_context(settings):
        figure = Figure(figsize=(9.0, 5.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
        points = {name: _plot_points(series.get(name, ())) for name in [*series, *(out_of_memory or {})]}
        styles = styles_of(points)
        for number, name in enumerate(_from_top(points, joined)):
            _draw_series(axes, name, points[name], styles[name], joined)
            for x in (out_of_memory or {}).get(name, []):
                place = axes.get_xaxis_transform()
                axes.plot([x], [0.02 + 0.03 * number], "x", color=styles[name][0], transform=place)
        if out_of_memory:
            axes.plot([], [], "x", color=INK, label="out of memory")
        if diagonal:
            _draw_diagonal(axes, points)
        if from_zero:
            highest = max((point.high or point.y for group in points.values() for point in group), default=1.0)
            axes.set_ylim(0, HEADROOM * highest)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", fontsize="small", frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def styles_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and the marker of each series: from STYLES, else the next unused pair of SPARE_STYLES."""
    names = list(names)
    styles: dict[str, tuple[str, str]] = {}
    for name in names:
        known_names = [known for known in STYLES if name.replace(",", "").startswith(known)]
        if known_names:
            styles[name] = STYLES[max(known_names, key=len)]
    for name in names:
        spare_styles = [style for style in SPARE_STYLES if style not in styles.values()] or SPARE_STYLES
        styles.setdefault(name, spare_styles[0])
    return styles


def _plot_points(points: Points) -> list[PlotPoint]:
    plot_points = [point if isinstance(point, PlotPoint) else PlotPoint(x=point[0], y=point[1]) for point in points]
    return sorted(plot_points, key=lambda point: (point.x, point.y))


def _from_top(points: Mapping[str, Sequence[PlotPoint]], joined: bool) -> list[str]:
    """Return the names of the series in the order of the legend, the highest first: by the end of each line, or by the
    highest point."""
    heights = {name: [point.y for point in group] or [0.0] for name, group in points.items()}
    return sorted(heights, key=lambda name: heights[name][-1] if joined else max(heights[name]), reverse=True)


def _draw_series(axes: Axes, name: str, points: Sequence[PlotPoint], style: tuple[str, str], joined: bool) -> None:
    color, marker = style
    line = "-" if joined else "none"
    heights = [point.y for point in points]
    axes.plot([p.x for p in points], heights, linestyle=line, marker=marker, markersize=6, color=color, label=name)
    for point in points:
        if point.low is not None and point.high is not None:
            axes.plot([point.x, point.x], [point.low, point.high], color=color, linewidth=1.2, alpha=0.7)
        if point.label:
            place = (point.x, point.y)
            axes.annotate(point.label, place, (5, 5), textcoords="offset points", color=color, fontsize="x-small")


def _draw_diagonal(axes: Axes, points: Mapping[str, Sequence[PlotPoint]]) -> None:
    from matplotlib.ticker import NullFormatter

    values = [value for group in points.values() for point in group for value in (point.x, point.y) if value > 0]
    ends = [min(values, default=1.0), max(values, default=1.0)]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log", base=2)
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
