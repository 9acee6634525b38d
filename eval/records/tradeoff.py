"""Two ways to compare a curve of (peak, speed) with a point: speed at equal peak, and peak at equal speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method's measured peak and speed."""

    name: str
    peak_bytes: float
    speed: float
    """Tokens per second."""
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A curve beside one peer; None where the curve does not reach."""

    peer: str
    compiled: bool
    speed_ratio: float | None
    """The curve's speed at the peer's peak, over the peer's."""
    peak_ratio: float | None
    """The curve's peak at the peer's speed, over the peer's."""


def compare(curve: Sequence[Point], peers: Sequence[Point]) -> list[Comparison]:
    """The best that the curve's points and mixtures of neighbours do, beside each peer."""
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
    """The fastest point that needs no more memory; None if all need more."""
    fitting = [point for point in points if point.peak_bytes <= peak_bytes]
    return max(fitting, key=lambda point: point.speed, default=None)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both peak and speed, by rising peak and so by rising speed."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, -point.speed)):
        if not kept or point.speed > kept[-1].speed:
            kept.append(point)
    return kept


def speed_at(best: Sequence[Point], peak_bytes: float) -> float | None:
    """The speed that a frontier has at a peak; None below its least peak. More memory than its most changes nothing.

    Example: between (peak 10, speed 1) and (peak 20, speed 3) it is 2 at peak 15; it is 3 at peak 30.
    """
    if not best or peak_bytes < best[0].peak_bytes:
        return None
    for left, right in pairwise(best):
        if peak_bytes <= right.peak_bytes:
            share = (peak_bytes - left.peak_bytes) / (right.peak_bytes - left.peak_bytes)
            return left.speed + share * (right.speed - left.speed)
    return best[-1].speed


def peak_at(best: Sequence[Point], speed: float) -> float | None:
    """The peak at which a frontier has a speed; None above its greatest. Slower than its least changes nothing."""
    if not best or speed > best[-1].speed:
        return None
    for left, right in pairwise(best):
        if left.speed < speed <= right.speed:
            share = (speed - left.speed) / (right.speed - left.speed)
            return left.peak_bytes + share * (right.peak_bytes - left.peak_bytes)
    return best[0].peak_bytes
