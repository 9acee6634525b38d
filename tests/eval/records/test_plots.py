"""Plots are deterministic, need only some of the points, and are readable on light and on dark pages."""

from pathlib import Path

import pytest

from adacc_hf.eval.records import plots

DARK_PAGE = "#1e2129"
"""Background of the site's dark pages."""


def luminance(color: str) -> float:
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, background: str) -> float:
    """Return the contrast ratio as WCAG defines it."""
    low, high = sorted((luminance(color), luminance(background)))
    return (high + 0.05) / (low + 0.05)


def test_a_plot_names_its_series_and_repeats_itself(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plots.curves(tmp_path / name, {"fast": [(2, 3), (1, 2)]}, "x", "y", {"fast": [4], "large": [1, 2]})
    texts = [(tmp_path / name).read_text() for name in ("one.svg", "two.svg")]
    assert texts[0] == texts[1]
    for label in ("fast", "large", "out of memory"):
        assert f">{label}<" in texts[0]


@pytest.mark.parametrize("page", ["#ffffff", DARK_PAGE])
def test_colours_are_readable_on_light_and_dark_pages(page: str) -> None:
    """WCAG asks for a contrast of 3 for graphics."""
    colors = {color for color, _ in (*plots.STYLES.values(), *plots.SPARE_STYLES)}
    assert {color: contrast(color, page) for color in colors if contrast(color, page) < 3} == {}
    assert contrast(plots.INK, page) > 3.9


def test_points_with_a_spread_and_a_label(tmp_path: Path) -> None:
    """Unjoined points have no line, the axis starts at 0, and the highest series is the first of the legend."""
    points = {
        "slow": [plots.PlotPoint(x=1, y=10, low=9, high=11, label="25%")],
        "fast": [plots.PlotPoint(x=2, y=30), plots.PlotPoint(x=3, y=8)],
    }
    plots.curves(tmp_path / "points.svg", points, "x", "tokens/s", joined=False, from_zero=True)
    text = (tmp_path / "points.svg").read_text()
    assert ">25%<" in text
    assert text.index(">fast<") < text.index(">slow<")
    plots.curves(tmp_path / "joined.svg", points, "x", "tokens/s", from_zero=True)
    joined = (tmp_path / "joined.svg").read_text()
    assert joined.index(">slow<") < joined.index(">fast<"), "joined: the end of the line counts"
    assert joined.count("stroke-width: 1.5") > text.count("stroke-width: 1.5")
