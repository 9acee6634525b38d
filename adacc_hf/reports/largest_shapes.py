"""Report's picture of the largest batch and the longest sequence that fit, by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.reports.plots import FONT, new_figure, plot_module, to_png

COLUMNS = {"largest_batch": "largest batch [sequences]", "longest_seq_len": "longest sequence [tokens]"}
"""Columns of a comparison of methods that are drawn, with the label of their axis."""
COLOR, PLAIN_COLOR = "#0072B2", "#aab2bb"
BAR_INCHES = 0.5
LABEL_MARGIN = 0.35
"""Space to the right of the longest bar for its number, as a fraction of the bar."""


def has_largest_shapes(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all `records` have the numbers that are drawn, and not all are 0."""
    numbers = [record.get(column) for record in records for column in COLUMNS]
    return bool(numbers) and None not in numbers and any(numbers)


def draw_largest_shapes(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the largest batch and the longest sequence of each method in `records`, the first on top. Return PNG bytes.

    Each number is followed by its ratio to the first method's.
    """
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(BAR_INCHES * len(records) + 0.9)
        axes = figure.subplots(1, len(COLUMNS), sharey=True)
        colors = [PLAIN_COLOR, *[COLOR] * (len(records) - 1)]
        for axis, (column, label) in zip(axes, COLUMNS.items(), strict=True):
            numbers = [record[column] for record in records]
            bars = axis.barh([str(record["method"]) for record in records], numbers, height=0.6, color=colors)
            axis.bar_label(bars, [_number_text(number, numbers[0]) for number in numbers], padding=4, fontsize=9)
            axis.set_xlim(0, (1 + LABEL_MARGIN) * max(*numbers, 1))
            axis.set_xlabel(label)
            axis.locator_params(axis="x", nbins=5)
            axis.tick_params(axis="y", length=0)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].invert_yaxis()
        return to_png(figure)


def _number_text(number: int, plain: int) -> str:
    """Return `number`, of one training method, as text. The ratio to `plain`, the number of plain training, is added if
    the two differ and `plain` is not 0."""
    return f"{number:,}" if not plain or number == plain else f"{number:,} ({number / plain:.1f} x)"
