"""Pictures of a report as PNG bytes: actions by activation, memory over a step, and figures over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tables import ACTION_COLORS
from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Timeline = Sequence[tuple[str, int]]
"""Live bytes over a step, as (name of the running phase, live bytes) in order of time."""

Span = tuple[float, float]
"""Start and width of a phase on a picture's horizontal axis, which shows a step."""

HEAD = "head and loss"
SECTIONS = {HEAD: "head\nand loss", "before or after the blocks": "outside\nthe blocks", "optimizer": "optimizer"}
"""Labels of the sections of a step that lie outside the blocks' forward and backward. The section of the head (output
layer and loss) contains the head's forward and backward."""
SECTION_SHARE = 0.15
"""Minimum width of a section outside the blocks, as a fraction of the width of all blocks. A label then gets at least
0.9 inches."""
WIDTH_INCHES = 10.0
DPI = 160  # 1600 pixels: sharp on a page 1000 pixels wide at double density
ROW_INCHES = 0.24  # height of a line of text
PANEL_INCHES = 0.9  # height of a panel's title and ticks
FONT = {"font.size": 10, "text.color": "#1f2328", "axes.labelcolor": "#1f2328", "axes.edgecolor": "#8c959f"}
GRID_COLOR = "#ffffff"
# Colour, width in points and dashes of each curve, in drawing order. The colours are Okabe and Ito's palette, which
# colour-blind readers can distinguish. The dashes are for prints.
CURVES: dict[str, tuple[str, float, Any]] = {
    "plain": ("#56606b", 1.6, "-"),
    "full recomputation": ("#009E73", 1.6, (0, (5, 1.5))),
    "this policy": ("#0072B2", 2.6, "-"),
}


def draw_policy_map(profile: Profile, policy: Policy) -> bytes:
    """Draw the action for each activation in each block. Return PNG bytes.

    Blocks with the same operators share a panel. Rows are activations, columns are blocks in forward order, and colours
    are actions.
    """
    profile = profile.under([policy.plan_of(block.name) for block in profile.blocks])
    panels = [(index, kind) for index, kind in enumerate(profile.kinds) if kind.activations]
    num_rows = [len(kind.activations) for _, kind in panels]
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(ROW_INCHES * sum(num_rows) + PANEL_INCHES * len(panels) + 0.4)
        axes = figure.subplots(len(panels), 1, height_ratios=num_rows, squeeze=False)[:, 0]
        for axis, (index, kind) in zip(axes, panels, strict=True):
            columns = [
                (str(place), policy.plan_of(block.name))
                for place, block in enumerate(profile.blocks)
                if block.kind == index
            ]
            _draw_kind(axis, kind, columns)
        draw_action_legend(figure)
        return to_png(figure)


def draw_memory(timelines: Mapping[str, Timeline], static_bytes: int, budget_bytes: int | None = None) -> bytes:
    """Draw the live bytes over one training step, one curve per entry of `timelines`. Return PNG bytes.

    All curves have the same phases, and names in CURVES.
    """
    highest_bytes = max(live for timeline in timelines.values() for _, live in timeline)
    scale, unit = unit_of(highest_bytes)
    phases = [phase for phase, _ in groupby(next(iter(timelines.values())), key=lambda moment: moment[0])]
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(4.6)
        axis = figure.subplots()
        spans = _phase_spans(axis, phases)
        for name in (name for name in CURVES if name in timelines):
            _draw_curve(axis, name, timelines[name], spans, scale)
        if budget_bytes is not None:
            label = f"budget, {format_bytes(budget_bytes)}"
            axis.axhline(budget_bytes / scale, color="#CC79A7", lw=1.4, ls="-.", label=label)
        label = f"parameters, optimizer, batch, {format_bytes(static_bytes)}"
        axis.axhspan(0, static_bytes / scale, color="#eceff2", lw=0, label=label)
        axis.set_ylim(0, 1.05 * max(highest_bytes, budget_bytes or 0) / scale)
        axis.set_ylabel(f"live tensor memory [{unit}]")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        return to_png(figure)


def plot_module(name: str) -> Any:
    """Return the module `name`, which a report needs. If it is missing, raise an ImportError that names the extra to
    install."""
    try:
        return import_module(name)
    except ImportError as error:
        message = f"a report needs {name}, which is not installed: pip install 'adacc-hf[plot]'"
        raise ImportError(message, name=name) from error


def new_figure(height_inches: float) -> Figure:
    """Return an empty matplotlib figure.

    pyplot is not used, because it would change the backend and figures of the calling program.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained")


def to_png(figure: Figure) -> bytes:
    """Return a matplotlib figure as PNG bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_kind(axis: Axes, kind: KindProfile, columns: Sequence[tuple[str, Plan]]) -> None:
    """Draw one panel of the policy map, for one kind of block. `columns` contains the position in the model and the
    plan of each block of this kind."""
    from matplotlib.colors import ListedColormap

    order = list(Action)
    colors = ListedColormap([ACTION_COLORS[action.value] for action in order])
    plans = [dict(plan.choices) for _, plan in columns]
    cells = [[order.index(plan[value.index].action) for plan in plans] for value in kind.activations]
    rows = len(kind.activations)
    axis.pcolormesh(cells, cmap=colors, vmin=0, vmax=len(order) - 1, edgecolors=GRID_COLOR, linewidth=1.5)
    axis.invert_yaxis()
    places = [row + 0.5 for row in range(rows)]
    axis.set_yticks(places, [kind.names[value.index] for value in kind.activations])
    sizes = axis.secondary_yaxis("right")
    sizes.set_yticks(places, [format_bytes(value.nbytes) for value in kind.activations])
    stride = 1 + len(columns) // 32  # more labels would overlap
    axis.set_xticks([place + 0.5 for place in range(0, len(columns), stride)], [c[0] for c in columns[::stride]])
    for any_axis in (axis, sizes):
        any_axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    sizes.spines[:].set_visible(False)
    axis.set_xlabel(f"block, in forward order ({kind.block_class})")


def draw_action_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in ACTION_COLORS.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)


def _draw_curve(axis: Axes, name: str, timeline: Timeline, spans: Mapping[str, Span], scale: float) -> None:
    """Draw a timeline as one curve. The points of each phase are spread evenly over the phase's span on the axis."""
    positions: list[float] = []
    sizes: list[float] = []
    for phase, group in groupby(timeline, key=lambda moment: moment[0]):
        moments = [live / scale for _, live in group]
        start, width = spans[phase]
        positions += [start + width * k / len(moments) for k in range(len(moments))] + [start + width]
        sizes += [*moments, moments[-1]]
    color, line_width, dashes = CURVES[name]
    peak = format_bytes(max(live for _, live in timeline))
    axis.plot(positions, sizes, color=color, lw=line_width, ls=dashes, ds="steps-post", label=f"{name}, peak {peak}")


def _phase_spans(axis: Axes, phases: Sequence[str]) -> dict[str, Span]:
    """Label the sections of the step below `axis`, with thin lines between them. Return the start and width of each
    phase. A block is one unit wide. Each section outside the blocks gets at least `SECTION_SHARE` of the blocks' width,
    to fit its label."""
    sections = [(section, list(group)) for section, group in groupby(phases, key=_phase_section)]
    num_blocks = sum(len(names) for section, names in sections if section not in SECTIONS)
    spans: dict[str, Span] = {}
    ticks, labels, end = [], [], 0.0
    for section, names in sections:
        start = end
        width = max(1.0, SECTION_SHARE * num_blocks / len(names)) if section in SECTIONS else 1.0
        for name in names:
            spans[name] = (end, width)
            end += width
        ticks.append((start + end) / 2)
        blocks = "1 block" if len(names) == 1 else f"{len(names)} blocks"
        labels.append(SECTIONS.get(section, f"{section},\n{blocks}"))
        if start:
            axis.axvline(start, color="#c3c9d0", lw=0.8, zorder=0)
    axis.set_xlim(0, end)
    axis.set_xticks(ticks, labels)
    axis.tick_params(axis="x", length=0)
    return spans


def _phase_section(phase: str) -> str:
    """Return the section of the step that a phase belongs to: "forward", "backward", or a section in SECTIONS."""
    if phase.endswith(HEAD):
        return HEAD
    return phase if phase in SECTIONS else phase.split(" ", 1)[0]


def unit_of(num_bytes: int) -> tuple[float, str]:
    """Return the bytes and the name of the largest unit that is at most `num_bytes`: (1048576.0, "MiB") for 5 MiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return float(size), unit
    return 1.0, "B"


# Picture of a run over its optimizer steps: outliers (the paper's Figure 4), errors, step time and peak memory.

MAX_CURVES = 8
"""Maximum number of activations in the picture of outliers, because more curves could not be told apart. The
activations with the largest change are drawn."""
CURVE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#56606b", "#000000")
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
Curve = list[tuple[int, float]]


def draw_timeline(history: Sequence[Mapping[str, Any]]) -> bytes:
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


def _timeline_panels(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Curve]]]:
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
            f"peak [{unit}]",
            {
                "measured": _record_curve(history, "measured_peak_bytes", scale),
                "predicted": _record_curve(history, "peak_bytes", scale),
            },
        ),
    ]


def outlier_curves(tracking: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return curves of the number of outliers over the steps, for the MAX_CURVES activations that change most."""
    curves: dict[str, Curve] = {}
    for record in tracking:
        for name, count in record.get("num_outliers", {}).items():
            curves.setdefault(name, []).append((record["step"], float(count)))

    def movement(name: str) -> tuple[float, float]:
        counts = [count for _, count in curves[name]]
        return (max(counts) - min(counts), max(counts))

    return {name: curves[name] for name in sorted(curves, key=movement, reverse=True)[:MAX_CURVES]}


def _record_curve(records: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> Curve:
    return [(record["step"], record[name] / scale) for record in records if record.get(name) is not None]


def _draw_panel(axis: Axes, label: str, curves: Mapping[str, Curve]) -> None:
    for color, (name, curve) in zip(CURVE_COLORS, ((n, c) for n, c in curves.items() if c), strict=False):
        steps, values = zip(*curve, strict=True)
        marker = "x" if name == "predicted" else "o"
        dashes = (0, (4, 2)) if name == "predicted" else "-"
        # Not clipped, because a marker at the value 0 is on the axis.
        axis.plot(steps, values, color=color, marker=marker, ms=3.5, lw=1.4, ls=dashes, label=name, clip_on=False)
    axis.set_ylabel(label)
    axis.set_ylim(0, HEADROOM * max((value for curve in curves.values() for _, value in curve), default=0.0) or 1.0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _mark_events(axis: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    for record in history:
        if record["event"] in MARKS:
            _, color, dashes = MARKS[record["event"]]
            axis.axvline(record["step"], color=color, lw=0.9, ls=dashes, zorder=0)


def _legend_of_marks(figure: Any, history: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    events = {record["event"] for record in history}
    handles = [
        Line2D([], [], color=color, ls=dashes, label=label)
        for event, (label, color, dashes) in MARKS.items()
        if event in events
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
