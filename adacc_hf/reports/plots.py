"""Pictures of a report as PNG bytes: actions by activation, memory over a step, and overhead by peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from adacc_hf.artifacts.block_outcome import rerun_ms
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.memory_simulator import plain_blocks_ms
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tables import ACTION_COLORS
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.plan_pools import PlanPools
from adacc_hf.solve.search import PolicySearch
from adacc_hf.solve.simple_policies import uniform_policy

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
    "this policy, measured": ("#D55E00", 1.6, (0, (1, 1.2))),
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


def draw_memory(timelines: dict[str, Timeline], static_bytes: int, budget_bytes: int | None = None) -> bytes:
    """Draw the live bytes over one training step, one curve per entry of `timelines`. Return PNG bytes.

    Raises ValueError for a curve name that is not in CURVES, and for a phase of the step that the first curve does not
    contain.
    """
    unknown = set(timelines) - set(CURVES)
    if unknown:
        raise ValueError(f"timelines={sorted(unknown)} are unknown: choose from {', '.join(CURVES)}")
    highest_bytes = max(live for timeline in timelines.values() for _, live in timeline)
    scale, unit = unit_of(highest_bytes)
    spans = _phase_spans([phase for phase, _ in groupby(next(iter(timelines.values())), key=lambda moment: moment[0])])
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(4.6)
        axis = figure.subplots()
        for name in (name for name in CURVES if name in timelines):
            _draw_curve(axis, name, timelines[name], spans, scale)
        if budget_bytes is not None:
            label = f"budget, {format_bytes(budget_bytes)}"
            axis.axhline(budget_bytes / scale, color="#CC79A7", lw=1.4, ls="-.", label=label)
        label = f"parameters, optimizer, batch, {format_bytes(static_bytes)}"
        axis.axhspan(0, static_bytes / scale, color="#eceff2", lw=0, label=label)
        _label_sections(axis, spans)
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
        if phase not in spans:
            choices = ", ".join(spans)
            raise ValueError(
                f"timeline {name!r} has phase {phase!r}, which is not in the first timeline: choose from {choices}"
            )
        moments = [live / scale for _, live in group]
        start, width = spans[phase]
        positions += [start + width * k / len(moments) for k in range(len(moments))] + [start + width]
        sizes += [*moments, moments[-1]]
    color, line_width, dashes = CURVES[name]
    peak = format_bytes(max(live for _, live in timeline))
    axis.plot(positions, sizes, color=color, lw=line_width, ls=dashes, ds="steps-post", label=f"{name}, peak {peak}")


def _phase_spans(phases: Sequence[str]) -> dict[str, Span]:
    """Return the start and width of each phase of a step on the horizontal axis. A block is one unit wide. Each section
    of the step outside the blocks gets at least `SECTION_SHARE` of the blocks' width, to fit its label."""
    num_blocks = sum(_is_block_phase(phase) for phase in phases)
    spans: dict[str, Span] = {}
    start = 0.0
    for _, group in groupby(phases, key=_phase_section):
        section_phases = list(group)
        is_narrow = not _is_block_phase(section_phases[0])
        width = max(1.0, SECTION_SHARE * num_blocks / len(section_phases)) if is_narrow else 1.0
        for phase in section_phases:
            spans[phase] = (start, width)
            start += width
    return spans


def _label_sections(axis: Axes, spans: Mapping[str, Span]) -> None:
    """Label the sections of the step below the axis, and draw a thin line between neighbouring sections."""
    start, ticks, labels = 0.0, [], []
    for section, group in groupby(spans, key=_phase_section):
        section_phases = list(group)
        end = sum(spans[section_phases[-1]])
        ticks.append((start + end) / 2)
        blocks = "1 block" if len(section_phases) == 1 else f"{len(section_phases)} blocks"
        labels.append(SECTIONS.get(section, f"{section},\n{blocks}"))
        if start:
            axis.axvline(start, color="#c3c9d0", lw=0.8, zorder=0)
        start = end
    axis.set_xlim(0, start)
    axis.set_xticks(ticks, labels)
    axis.tick_params(axis="x", length=0)


def _is_block_phase(phase: str) -> bool:
    return _phase_section(phase) not in SECTIONS


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


# Third picture of a report: the least overhead at each peak, compared with other methods.

NUM_BUDGETS = 16
"""Number of budgets on the curve."""
Point = tuple[int, float]
"""Peak memory of the step in bytes, and overhead compared with plain training in ms."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Marker for one training method in the picture of overhead by peak memory."""

    name: str
    point: Point
    color: str
    shape: str


def trade_off(profile: Profile) -> list[Point]:
    """Return (peak, overhead) of Pareto-optimal policies, in order of increasing peak memory.

    All actions and all codecs with known costs are allowed. The solver refines its policies, and so can find further
    ones between two points.
    """
    search = PolicySearch(profile, PlanPools(profile, AdaccConfig(), limits_peak=True, host_limit=0))
    points = search.trade_off(NUM_BUDGETS)
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def marks(profile: Profile, policy: Policy) -> list[Mark]:
    """Return markers for four methods: plain training, torch's checkpoint on every block, compression, and `policy`.

    Compression means that every activation is compressed.
    """
    from adacc_hf.kernels.codecs import baseline_codec

    plain, full = uniform_policy(profile, Action.RETAIN), uniform_policy(profile, Action.RECOMPUTE)
    # torch's checkpoint reruns a block's forward up to the last saved tensor. Replay runs only operators that backward
    # needs.
    checkpoint_ms = sum(rerun_ms(profile.kind_of(block)) for block in profile.blocks)
    codecs = {option.codec for kind in profile.kinds for value in kind.values for option in value.codecs}
    baseline = baseline_codec() if baseline_codec() in codecs else None
    quantized = uniform_policy(profile, Action.COMPRESS, baseline)
    naive = "all compressed, codec by layer" if baseline is None else f"naive quantization ({baseline})"
    return [
        Mark(name="plain", point=_policy_point(plain), color="#56606b", shape="s"),
        Mark(name="full checkpointing", point=(full.predicted_peak_bytes, checkpoint_ms), color="#009E73", shape="^"),
        Mark(name=naive, point=_policy_point(quantized), color="#E69F00", shape="D"),
        Mark(name="this policy", point=_policy_point(policy), color="#0072B2", shape="*"),
    ]


def _policy_point(policy: Policy) -> Point:
    return policy.predicted_peak_bytes, policy.predicted_overhead_ms


def draw_frontier(profile: Profile, policy: Policy, budget_bytes: int | None = None) -> bytes:
    """Draw overhead by peak memory of the step: a curve of policies, and a marker for each training method.

    Return PNG bytes.
    """
    curve, methods = trade_off(profile.with_head(policy.head)), marks(profile, policy)
    scale, unit = unit_of(max(peak for peak, _ in [*curve, *(mark.point for mark in methods)]))
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(4.6)
        axis = figure.subplots()
        _draw_tradeoff(axis, curve, scale)
        for mark in methods:
            (peak, ms), size = mark.point, 15 if mark.shape == "*" else 9
            label = f"{mark.name}: {format_bytes(peak)}, {ms:.2f} ms"
            axis.plot(peak / scale, ms, mark.shape, ms=size, color=mark.color, mec="white", ls="", label=label)
        if budget_bytes is not None:
            label = f"budget, {format_bytes(budget_bytes)}"
            axis.axvline(budget_bytes / scale, color="#CC79A7", lw=1.4, ls="-.", zorder=0, label=label)
        axis.set_xlabel(f"peak of the step [{unit}]")
        axis.set_ylabel("overhead per step [ms]")
        least_ms = min(ms for _, ms in [*curve, *(mark.point for mark in methods)])  # negative if the head is faster
        axis.set_ylim(bottom=min(0.0, least_ms) - 0.03 * axis.get_ylim()[1])
        blocks_ms = plain_blocks_ms(profile)
        if blocks_ms > 0:
            share = axis.secondary_yaxis(
                "right",
                functions=(
                    lambda ms: 100 * np.asarray(ms) / blocks_ms,
                    lambda share: np.asarray(share) * blocks_ms / 100,
                ),
            )
            share.set_ylabel("% of the blocks' time in a plain step")
        axis.grid(color="#e3e6ea", lw=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return to_png(figure)


def _draw_tradeoff(axis, curve: Sequence[Point], scale: float) -> None:
    """Draw the trade-off of overhead and peak as a staircase, because a policy also fits every larger budget."""
    peaks, times = [peak / scale for peak, _ in curve], [ms for _, ms in curve]
    axis.plot(peaks, times, color="#0072B2", lw=1.8, ds="steps-post", label="the solver's policies, any action")
