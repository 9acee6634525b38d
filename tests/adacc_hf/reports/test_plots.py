"""The pictures of memory over a step, with its sections and their labels, and of a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.reports import plots
from adacc_hf.reports.document import Figure
from adacc_hf.reports.plots import MAX_CURVES, draw_memory, outlier_curves
from adacc_hf.reports.report import timeline_parts
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.fixture
def drawn(monkeypatch):
    """List of the figures that are drawn."""
    figures = []
    monkeypatch.setattr(plots, "to_png", lambda figure: figures.append(figure) or b"")
    return figures


@pytest.mark.parametrize("num_blocks", [1, 2, 6, 16, 80])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_labels_of_the_sections_of_a_step_are_apart(gpt2_like_profile, drawn, num_blocks, has_optimizer) -> None:
    profile = gpt2_like_profile(num_blocks=num_blocks)
    profile = replace(profile, optimizer_peak_bytes=profile.static_bytes if has_optimizer else 0)
    outcome = simulate_policy(profile, uniform_policy(profile, "recompute"))
    draw_memory({"plain": outcome.timeline}, profile.static_bytes)
    (figure,) = drawn
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    blocks = "1 block" if num_blocks == 1 else f"{num_blocks} blocks"
    expected = [f"forward,\n{blocks}", "head\nand loss", f"backward,\n{blocks}", "outside\nthe blocks"]
    assert [label.get_text() for label in labels] == [*expected, *(["optimizer"] if has_optimizer else [])]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 + 4 < right.x0 for left, right in pairwise(boxes)), "labels touch each other"
    assert boxes[-1].x1 <= figure.bbox.x1, "the last label leaves the picture"


def test_a_phase_is_drawn_over_its_span(gpt2_like_profile, drawn) -> None:
    """The peak of each phase is within the phase's section of the axis, in the order of the step."""
    profile = gpt2_like_profile(num_blocks=2)
    timeline = simulate_policy(profile, uniform_policy(profile, "retain")).timeline
    draw_memory({"plain": timeline}, 0)
    curve = drawn[0].axes[0].lines[-1]
    positions, sizes = curve.get_xdata(), curve.get_ydata()
    assert list(positions) == sorted(positions)
    assert positions[-1] == drawn[0].axes[0].get_xlim()[1]
    assert max(sizes) == max(live for _, live in timeline) / plots.unit_of(max(live for _, live in timeline))[0]


def history(steps=(1, 2, 4, 8)):
    tracked = [
        {
            "step": step,
            "event": "tracking",
            "num_outliers": {f"Block.mlp.{n}#{n}": n * step for n in range(12)},
            "errors": {"Block.mlp.0#0": 0.1},
            "gradient_error": 0.2,
        }
        for step in steps
    ]
    changed = {"step": 5, "event": "change", "reason": "less", "peak_bytes": 2**20}
    measured = {"step": 6, "event": "memory", "peak_bytes": 2**20, "measured_peak_bytes": 2**20 + 7}
    return [{"step": 0, "event": "policy", "peak_bytes": 2**21}, *tracked, changed, measured]


@pytest.mark.parametrize("steps", [(1, 2, 4, 8), (1, 64, 4096)], ids=["short", "long"])
def test_it_is_drawn(steps):
    pytest.importorskip("matplotlib")
    (figure,) = [part for part in timeline_parts(history(steps)) if isinstance(part, Figure)]
    assert figure.png.startswith(b"\x89PNG")


def test_the_activations_that_move_most_are_shown():
    curves = outlier_curves([record for record in history() if record["event"] == "tracking"])
    assert list(curves) == [f"Block.mlp.{n}#{n}" for n in range(11, 11 - MAX_CURVES, -1)]
    assert curves["Block.mlp.11#11"] == [(1, 11.0), (2, 22.0), (4, 44.0), (8, 88.0)]
