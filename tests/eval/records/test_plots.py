"""Plots are deterministic, and need only some of the points."""

from __future__ import annotations

from pathlib import Path

import pytest

from adacc_hf.eval.records import plots


def test_a_plot_names_its_series_and_repeats_itself(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plots.curves(tmp_path / name, {"fast": [(2, 3), (1, 2)]}, "x", "y", {"fast": [4], "large": [1, 2]})
    texts = [(tmp_path / name).read_text() for name in ("one.svg", "two.svg")]
    assert texts[0] == texts[1]
    for label in ("fast", "large", "out of memory"):
        assert f">{label}<" in texts[0]


def test_nothing_measured_is_an_empty_plot(tmp_path: Path) -> None:
    plots.curves(tmp_path / "empty.svg", {}, "x", "y")
    assert "<svg" in (tmp_path / "empty.svg").read_text()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    plots.curves(tmp_path / "none.svg", {"fast": [(1, 2)]}, "x", "y")
    assert "pip install 'adacc-hf[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
