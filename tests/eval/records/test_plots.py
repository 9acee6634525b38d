"""Plots are deterministic, and need only some of the points."""

from pathlib import Path

from adacc_hf.eval.records import plots


def test_a_plot_names_its_series_and_repeats_itself(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plots.curves(tmp_path / name, {"fast": [(2, 3), (1, 2)]}, "x", "y", {"fast": [4], "large": [1, 2]})
    texts = [(tmp_path / name).read_text() for name in ("one.svg", "two.svg")]
    assert texts[0] == texts[1]
    for label in ("fast", "large", "out of memory"):
        assert f">{label}<" in texts[0]


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
