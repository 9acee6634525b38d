"""The plot of overhead against peak: its curve is monotone, and its marks agree with the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from adacc_hf.artifacts.block_outcome import rerun_ms
from adacc_hf.artifacts.memory_simulator import simulate_policy
from adacc_hf.reports import plots
from adacc_hf.reports.plots import draw_frontier, draw_memory, marks, trade_off
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy


@pytest.fixture(scope="module")
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3, attention="eager")


def test_the_curve_falls_from_the_floor_to_plain(profile) -> None:
    curve = trade_off(profile)
    assert all(left[0] < right[0] and left[1] > right[1] for left, right in pairwise(curve))
    assert curve[-1] == (uniform_policy(profile, "retain").predicted_peak_bytes, 0.0)
    peak, ms = curve[len(curve) // 2]
    assert solve_policy(profile, peak).predicted_overhead_ms <= ms + 1e-9  # sums in another order


def test_marks_are_plain_checkpointing_quantization_and_the_policy(profile) -> None:
    policy = solve_policy(profile, 0.5)
    plain, full, quantized, ours = marks(profile, policy)
    assert plain.point == (uniform_policy(profile, "retain").predicted_peak_bytes, 0.0)
    assert full.point[0] == uniform_policy(profile, "recompute").predicted_peak_bytes
    assert full.point[1] == pytest.approx(3 * rerun_ms(profile.kinds[0]))
    assert quantized.name == "all compressed, codec by layer"
    assert ours.point == (policy.predicted_peak_bytes, policy.predicted_overhead_ms)


def test_a_budget_is_drawn(profile) -> None:
    policy = solve_policy(profile, 0.5)
    pictures = {draw_frontier(profile, policy, budget) for budget in (None, policy.predicted_peak_bytes)}
    assert len(pictures) == 2
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


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
    curve = drawn[0].axes[0].lines[0]
    positions, sizes = curve.get_xdata(), curve.get_ydata()
    assert list(positions) == sorted(positions)
    assert positions[-1] == drawn[0].axes[0].get_xlim()[1]
    assert max(sizes) == max(live for _, live in timeline) / plots.unit_of(max(live for _, live in timeline))[0]
