"""Speed at equal peak and peak at equal speed, interpolated on a curve."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.eval.records.peers_report import Point, compare, fastest_within, frontier, peak_at, speed_at

NUMBERS = st.floats(1.0, 1e6)
POINTS = st.lists(st.builds(Point, name=st.just("x"), peak_bytes=NUMBERS, speed=NUMBERS), min_size=1, max_size=8)


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(name=f"p{i}", peak_bytes=peak, speed=speed) for i, (peak, speed) in enumerate(pairs)]


def test_by_hand() -> None:
    best = frontier(points((20, 3), (10, 1), (15, 0.5)))
    assert [(point.peak_bytes, point.speed) for point in best] == [(10, 1), (20, 3)]
    assert [speed_at(best, peak) for peak in (9, 10, 15, 20, 30)] == [None, 1, 2, 3, 3]
    assert [peak_at(best, speed) for speed in (0.5, 1, 2, 3, 4)] == [10, 10, 15, 20, None]


def test_a_peer_is_compared_both_ways() -> None:
    rows = compare(points((10, 1), (20, 3)), [Point(name="peer", peak_bytes=15, speed=1.0, compiled=True)])
    assert (rows[0].peer, rows[0].compiled, rows[0].speed_ratio) == ("peer", True, 2.0)
    assert rows[0].peak_ratio == pytest.approx(10 / 15)  # as fast as the curve's slowest point


def test_nothing_is_read_off_beyond_the_points() -> None:
    row = compare(points((10, 1), (20, 3)), points((5, 4)))[0]
    assert (row.speed_ratio, row.peak_ratio) == (None, None)
    assert compare([], points((5, 4)))[0].speed_ratio is None


@given(POINTS)
def test_a_frontier_rises_and_covers_every_point(curve_points: list[Point]) -> None:
    best = frontier(curve_points)
    assert all(a.peak_bytes < b.peak_bytes and a.speed < b.speed for a, b in pairwise(best))
    for point in curve_points:
        assert any(best_point.peak_bytes <= point.peak_bytes and best_point.speed >= point.speed for best_point in best)


@given(POINTS)
def test_no_point_of_the_curve_beats_the_curve(curve_points: list[Point]) -> None:
    """Compared with its own points the curve has ratios of 1 or better, up to rounding in the interpolation."""
    for row in compare(curve_points, curve_points):
        assert row.speed_ratio >= 1 - 1e-9
        assert row.peak_ratio <= 1 + 1e-9


def test_the_fastest_within_a_peak() -> None:
    points = [
        Point(name=name, peak_bytes=peak, speed=speed) for name, peak, speed in (("a", 1, 5), ("b", 2, 4), ("c", 3, 9))
    ]
    assert fastest_within(points, 2).name == "a"
    assert fastest_within(points, 3).name == "c"
    assert fastest_within(points, 0.5) is None
