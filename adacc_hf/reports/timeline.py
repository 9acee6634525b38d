"""Picture of a run over its optimizer steps: outliers (the paper's Figure 4), errors, step time and peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adacc_hf.reports.document import Figure, Part
from adacc_hf.reports.plots import FONT, new_figure, plot_module, to_png, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
Curve = list[tuple[int, float]]

MAX_CURVES = 8
"""Maximum number of activations in the picture of outliers, because more curves could not be told apart. The
activations with the largest change are drawn."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#56606b", "#000000")
MARKS = {
    "policy": ("policy set", "#56606b", "-"),
    "change": ("policy changed", "#8c959f", ":"),
    "guard": ("guard", "#D55E00", "--"),
}
TIMELINE_INCHES = 2.1
LONG_RUN = 64
"""Number of steps above which the horizontal axis is logarithmic."""
HEADROOM = 1.15
"""Upper end of a panel's vertical axis, as a multiple of the largest value. The margin keeps curves and markers away
from the edge."""


def timeline_parts(history: Sequence[Record]) -> list[Part]:
    """Return the report's section with the picture of the run, or [] if `history` has no numbers to draw.

    The numbers come from events of tracking (outliers and errors) and of memory.
    """
    if not any(record["event"] in ("tracking", "memory") for record in history):
        return []
    return [
        "## The run",
        (
            "Outliers are channels stored raw at each tracking step: the maximum over all blocks of a kind. Vertical "
            "lines are policy changes and events of the guard. Predicted time is the time of the steps before a change "
            "plus the change in overhead."
        ),
        Figure("timeline.png", "Outliers, errors, step time and peak over the run", draw_timeline(history)),
    ]


def draw_timeline(history: Sequence[Record]) -> bytes:
    """Draw outliers, errors, step time and peak in `history` over the steps, one panel each. Return PNG bytes.

    Raises ValueError if `history` has none of these numbers.
    """
    panels = [panel for panel in _timeline_panels(history) if any(panel[1].values())]
    if not panels:
        raise ValueError("history has no tracking or memory event with figures: there is nothing to draw")
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(TIMELINE_INCHES * len(panels) + 0.5)
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (label, curves) in zip(axes, panels, strict=True):
            _draw_panel(axis, label, curves)
            _mark_events(axis, history)
        _legend_of_marks(figure, history)
        axes[-1].set_xlabel("optimizer step")
        first, last = min(record["step"] for record in history), max(record["step"] for record in history)
        if last > LONG_RUN:
            axes[-1].set_xscale("symlog", base=2, linthresh=8)  # intervals between tracking steps double
            axes[-1].xaxis.set_major_formatter("{x:g}")
            axes[-1].set_xlim(first - 0.4, 1.2 * last)
        else:
            axes[-1].set_xlim(first - 0.02 * (last - first) - 0.2, last + 0.03 * (last - first) + 0.2)
        return to_png(figure)


def _timeline_panels(history: Sequence[Record]) -> list[tuple[str, dict[str, Curve]]]:
    """Return (label of the vertical axis, curves by name) for each panel of the picture of a run."""
    peaks = [float(r[name]) for r in history for name in ("measured_peak_bytes", "peak_bytes") if name in r]
    scale, unit = unit_of(int(max(peaks))) if peaks else (1.0, "B")
    tracking = [record for record in history if record["event"] == "tracking"]
    worst = [(r["step"], max(r["errors"].values())) for r in tracking if r.get("errors")]
    return [
        ("outlier channels", outlier_curves(tracking)),
        (
            "relative error",
            {
                "worst round trip": worst,
                "gradient of a sampled block": _record_curve(tracking, "gradient_error"),
            },
        ),
        (
            "step [ms]",
            {
                "measured": _record_curve(history, "step_ms"),
                "predicted": _record_curve(history, "predicted_step_ms"),
            },
        ),
        (
            f"peak [{unit}]",
            {
                "measured": _record_curve(history, "measured_peak_bytes", scale),
                "predicted": _record_curve(history, "peak_bytes", scale),
            },
        ),
    ]


def outlier_curves(tracking: Sequence[Record]) -> dict[str, Curve]:
    """Return curves of the number of outliers over the steps, for the MAX_CURVES activations that change most."""
    curves: dict[str, Curve] = {}
    for record in tracking:
        for name, count in record.get("num_outliers", {}).items():
            curves.setdefault(name, []).append((record["step"], float(count)))

    def movement(name: str) -> tuple[float, float]:
        counts = [count for _, count in curves[name]]
        return (max(counts) - min(counts), max(counts))

    return {name: curves[name] for name in sorted(curves, key=movement, reverse=True)[:MAX_CURVES]}


def _record_curve(records: Sequence[Record], name: str, scale: float = 1.0) -> Curve:
    return [(record["step"], record[name] / scale) for record in records if record.get(name) is not None]


def _draw_panel(axis: Axes, label: str, curves: Mapping[str, Curve]) -> None:
    for color, (name, curve) in zip(COLORS, ((n, c) for n, c in curves.items() if c), strict=False):
        steps, values = zip(*curve, strict=True)
        marker = "x" if name == "predicted" else "o"
        dashes = (0, (4, 2)) if name == "predicted" else "-"
        # Not clipped, because a marker at the value 0 is on the axis.
        axis.plot(steps, values, color=color, marker=marker, ms=3.5, lw=1.4, ls=dashes, label=name, clip_on=False)
    axis.set_ylabel(label)
    axis.set_ylim(0, HEADROOM * max((value for curve in curves.values() for _, value in curve), default=0.0) or 1.0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _mark_events(axis: Axes, history: Sequence[Record]) -> None:
    for record in history:
        if record["event"] in MARKS:
            _, color, dashes = MARKS[record["event"]]
            axis.axvline(record["step"], color=color, lw=0.9, ls=dashes, zorder=0)


def _legend_of_marks(figure: Any, history: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    events = {record["event"] for record in history}
    handles = [
        Line2D([], [], color=color, ls=dashes, label=label)
        for event, (label, color, dashes) in MARKS.items()
        if event in events
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
