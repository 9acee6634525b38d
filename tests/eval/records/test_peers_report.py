"""Speed at equal peak and peak at equal speed, interpolated on a curve."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.eval.records.peers_report import Point, frontier, peak_at, speed_at

NUMBERS = st.floats(1.0, 1e6)
POINTS = st.lists(st.builds(Point, name=st.just("x"), peak_bytes=NUMBERS, speed=NUMBERS), min_size=1, max_size=8)


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(name=f"p{i}", peak_bytes=peak, speed=speed) for i, (peak, speed) in enumerate(pairs)]


def test_by_hand() -> None:
    best = frontier(points((20, 3), (10, 1), (15, 0.5)))
    assert [(point.peak_bytes, point.speed) for point in best] == [(10, 1), (20, 3)]
    assert [speed_at(best, peak) for peak in (9, 10, 15, 20, 30)] == [None, 1, 2, 3, 3]
    assert [peak_at(best, speed) for speed in (0.5, 1, 2, 3, 4)] == [10, 10, 15, 20, None]


@given(POINTS)
def test_a_frontier_rises_and_covers_every_point(curve_points: list[Point]) -> None:
    best = frontier(curve_points)
    assert all(a.peak_bytes < b.peak_bytes and a.speed < b.speed for a, b in pairwise(best))
    for point in curve_points:
        assert any(best_point.peak_bytes <= point.peak_bytes and best_point.speed >= point.speed for best_point in best)
