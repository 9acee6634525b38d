"""Comparisons of a curve of (peak, speed) with a point: speed at equal peak, and peak at equal speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measured peak and speed of a method."""

    name: str
    peak_bytes: float
    speed: float
    """Tokens per second."""
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a curve with one peer. Ratios are None outside the range of the curve."""

    peer: str
    compiled: bool
    speed_ratio: float | None
    """The curve's speed at the peer's peak, divided by the peer's speed."""
    peak_ratio: float | None
    """The curve's peak at the peer's speed, divided by the peer's peak."""


def compare(curve: Sequence[Point], peers: Sequence[Point]) -> list[Comparison]:
    """Compare each peer with the best points of the curve, and with mixtures of neighbouring points."""
    best = frontier(curve)
    rows = []
    for peer in peers:
        speed, peak = speed_at(best, peer.peak_bytes), peak_at(best, peer.speed)
        rows.append(
            Comparison(
                peer=peer.name,
                compiled=peer.compiled,
                speed_ratio=None if speed is None else speed / peer.speed,
                peak_ratio=None if peak is None else peak / peer.peak_bytes,
            )
        )
    return rows


def fastest_within(points: Sequence[Point], peak_bytes: float) -> Point | None:
    """Return the fastest point with at most `peak_bytes`, or None if all points need more."""
    fitting = [point for point in points if point.peak_bytes <= peak_bytes]
    return max(fitting, key=lambda point: point.speed, default=None)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto-optimal points by rising peak, and so by rising speed."""
    optimal_points: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, -point.speed)):
        if not optimal_points or point.speed > optimal_points[-1].speed:
            optimal_points.append(point)
    return optimal_points


def speed_at(best: Sequence[Point], peak_bytes: float) -> float | None:
    """Return the speed of a frontier at a peak, or None below the least peak.

    Above the largest peak the speed is constant.

    Example: between (peak 10, speed 1) and (peak 20, speed 3) the speed is 2 at peak 15; at peak 30 it is 3.
    """
    if not best or peak_bytes < best[0].peak_bytes:
        return None
    for left, right in pairwise(best):
        if peak_bytes <= right.peak_bytes:
            share = (peak_bytes - left.peak_bytes) / (right.peak_bytes - left.peak_bytes)
            return left.speed + share * (right.speed - left.speed)
    return best[-1].speed


def peak_at(best: Sequence[Point], speed: float) -> float | None:
    """Return the peak of a frontier at a speed, or None above the largest speed.

    Below the least speed the peak is constant.
    """
    if not best or speed > best[-1].speed:
        return None
    for left, right in pairwise(best):
        if left.speed < speed <= right.speed:
            share = (speed - left.speed) / (right.speed - left.speed)
            return left.peak_bytes + share * (right.peak_bytes - left.peak_bytes)
    return best[0].peak_bytes
