"""Picture in a report of the memory at the peak of a step: one bar for each training method, divided by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.memory_simulator import EarlierBlocks, Outcome
from adacc_hf.artifacts.policy import Plan
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.plots import FONT, new_figure, plot_module, to_png, unit_of

PARTS = {
    "static_bytes": ("parameters, optimizer state, batch", "#aab2bb", "#1f2328"),
    "stored_bytes": ("stored by blocks for backward", "#0072B2", "#ffffff"),
    "other_bytes": ("gradients, output layer, running block", "#E69F00", "#1f2328"),
}
"""Label, colour and text colour of each part of a bar, by field of `PeakMemory`, from left to right."""
LABEL_SHARE = 0.1
"""Minimum width of a bar's part, as a fraction of the longest bar, above which the size is written into the part."""
BAR_INCHES = 0.5
DEVICE_MARGIN = 3.0
"""Maximum ratio of the device's memory to the longest bar. If the ratio is larger, no line is drawn at the device's
memory, because the bars would be too short."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Live bytes at the peak of a step, by purpose."""

    static_bytes: int
    stored_bytes: int
    """Bytes that blocks store for backward. If the peak is within a block, only the bytes of the earlier blocks
    count."""
    other_bytes: int
    """All other bytes: gradients, tensors outside the blocks, and tensors of the running block."""

    @property
    def peak_bytes(self) -> int:
        return self.static_bytes + self.stored_bytes + self.other_bytes


def peak_memory(profile: Profile, plans: Sequence[Plan], outcome: Outcome) -> PeakMemory:
    """Return the live bytes at the peak of a simulated step, by purpose.

    `outcome` is the result of simulating a step in which the i-th block of `profile` runs under `plans[i]`.
    """
    phase, _, name = outcome.peak_label.partition(" ")
    is_forward = phase in ("forward", "head")
    earlier = EarlierBlocks()
    profile = profile.under(plans)
    for block, plan in zip(profile.blocks, plans, strict=True):
        if block.name == name:
            break
        earlier = earlier.with_block(run_block(profile.kind_of(block), plan))
    stored_bytes = earlier.live_bytes if is_forward else earlier.stored_bytes
    if phase not in ("forward", "head", "backward"):  # the optimizer, or before and after the blocks
        stored_bytes = 0
    return PeakMemory(
        static_bytes=profile.static_bytes,
        stored_bytes=stored_bytes,
        other_bytes=outcome.peak_bytes - profile.static_bytes - stored_bytes,
    )


def draw_memory_bars(bars: Mapping[str, PeakMemory], available_bytes: int, budget_bytes: int | None = None) -> bytes:
    """Draw one bar per entry of `bars`, the first on top, with lines at the budget and at the device's memory.

    Return PNG bytes.
    """
    longest_bytes = max(max(bar.peak_bytes for bar in bars.values()), budget_bytes or 0)
    scale, unit = unit_of(longest_bytes)
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(BAR_INCHES * len(bars) + 1.3)
        axis = figure.subplots()
        names = [f"{name}, {format_bytes(bar.peak_bytes)}" for name, bar in bars.items()]
        starts = [0] * len(bars)
        handles: list[Any] = []
        for field, (label, color, text_color) in PARTS.items():
            widths = [getattr(bar, field) for bar in bars.values()]
            scaled = [width / scale for width in widths]
            handles.append(
                axis.barh(names, scaled, left=[s / scale for s in starts], height=0.6, color=color, label=label)
            )
            sizes = [format_bytes(width) if width > LABEL_SHARE * longest_bytes else "" for width in widths]
            axis.bar_label(handles[-1], sizes, label_type="center", color=text_color, fontsize=9)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        lines = {"budget": (budget_bytes, "#CC79A7", "-.")}
        if available_bytes <= DEVICE_MARGIN * longest_bytes:
            lines["available on the device"] = (available_bytes, "#D55E00", "--")
        for label, (nbytes, color, dashes) in lines.items():
            if nbytes is not None:
                line_label = f"{label}, {format_bytes(nbytes)}"
                handles.append(axis.axvline(nbytes / scale, color=color, ls=dashes, label=line_label))
        axis.invert_yaxis()
        axis.set_xlabel(f"live tensor memory at the peak of the step [{unit}]")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False)
        return to_png(figure)
