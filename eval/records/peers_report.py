"""Report of the comparison with peers, as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.plots import PlotPoint, curves, speed_point
from adacc_hf.eval.records.records import describe
from adacc_hf.reports.run_record import markdown_table

GROUPS = {
    "compile": "torch.compile",
    "xformers": "xformers",
    "adacc_exact": "Adacc, exact",
    "adacc_compiled": "Adacc in torch.compile",
    "adacc": "Adacc",
}
"""Lines of the plot, by prefix of the keys. Longer prefixes come first."""

MIB = 2**20


def report_text(ledger: Ledger) -> str:
    """Return a table of all points, tables of derived comparisons, and the reasons of points without measurement."""
    info, titles = ledger.run_info, ledger.summary["titles"]
    subject = info["subject"]
    heading = (
        f"{subject['preset']}, batch {subject['batch']} x {subject['tokens']} tokens, {subject['precision']}; median "
        f"(20th to 80th percentile) of {info['rounds']} whole training steps, each method in a process of its own"
    )
    parts = [heading, _points_table(ledger)]
    if against := ledger.summary["adacc_against"]:
        parts += [
            "Adacc compared with each peer, interpolated linearly between Adacc's points (plain training is one of "
            "them); empty outside the range of Adacc's points:",
            markdown_table([_comparison(row, titles) for row in against]),
        ]
    if within := ledger.summary["within_adaccs_peaks"]:
        parts += [
            "Adacc's tokens/s over those of the fastest peer that needs no more memory:",
            markdown_table([_rivals(row, titles) for row in within]),
            *_slower_points(within, titles),
        ]
    if matched_rows := _matched_rows(ledger):
        parts += [
            "torch.compile compared with Adacc in torch.compile, whose budget is the other's measured peak:",
            markdown_table(matched_rows),
        ]
    reasons = [f"- {reason}" for reason in ledger.reasons(titles)]
    return "\n\n".join([*parts, *(["Not measured:", "\n".join(reasons)] if reasons else [])]) + "\n"


def _points_table(ledger: Ledger) -> str:
    base = ledger.points.get("plain", {}).get("tokens_per_second", {}).get("median")
    rows = []
    for key, title in ledger.summary["titles"].items():
        point = ledger.points[key]
        own = point.get("tokens_per_second", {}).get("median")
        share = {"x plain": f"{own / base:.2f}" if own and base else ""}
        rows.append({"method": title, **describe(point), **share})
    return markdown_table(rows)


def _comparison(row: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, str]:
    def times(name: str) -> str:
        return "" if row[name] is None else f"{row[name]:.2f}x"

    return {
        "peer": titles[row["peer"]] + (" (compiled)" if row["compiled"] else ""),
        "Adacc's tokens/s at its peak": times("speed_ratio"),
        "Adacc's peak at its tokens/s": times("peak_ratio"),
    }


def _rivals(row: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, str]:
    def cell(kind: str) -> str:
        peer = row[kind]
        return "none fits" if peer is None else f"{peer['speed_ratio']:.2f}x of {titles[peer['peer']]}"

    return {"point": titles[row["adacc"]], "eager": cell("eager"), "compiled": cell("compiled")}


def matched_key(peer: str) -> str:
    """Return the key of Adacc's compiled point whose budget is the peak of `peer`."""
    return f"adacc_compiled_within_{peer}"


def _matched_rows(ledger: Ledger) -> list[dict[str, str]]:
    """Return a row for each pair of compiled points with equal peak."""
    rows = []
    for peer, title in ledger.summary["titles"].items():
        pair = [ledger.points.get(key, {}) for key in (peer, matched_key(peer))]
        if all("tokens_per_second" in point for point in pair):
            own, other = (point["tokens_per_second"]["median"] for point in reversed(pair))
            rows.append(
                {
                    "peer": title,
                    "its tokens/s": f"{other:.0f}",
                    "its peak": format_bytes(pair[0]["peak_bytes"]),
                    "Adacc's peak": format_bytes(pair[1]["peak_bytes"]),
                    "share of the bytes": f"{pair[1]['decided']['share']:.2f}",
                    "Adacc's tokens/s": f"{own:.0f}",
                    "ratio": f"{own / other:.2f}x",
                }
            )
    return rows


def _slower_points(within: list[Mapping[str, Any]], titles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line on the points at which Adacc is not the fastest."""
    for kind, note in (
        ("eager", ""),
        ("compiled", " (fused operators, which Adacc has in torch.compile only)"),
    ):
        slower_titles = [titles[row["adacc"]] for row in within if row[kind] and row[kind]["speed_ratio"] < 1.0]
        if slower_titles:
            yield f"Slower than the fastest {kind} peer{note}: {', '.join(slower_titles)}."


def save_plot(ledger: Ledger) -> None:
    """Plot tokens per second against peak, with the spread. Points of Adacc have their budget next to them, in percent
    of plain training's stored bytes."""
    series: dict[str, list[PlotPoint]] = {}
    for key, title in ledger.summary["titles"].items():
        point = ledger.points[key]
        if "tokens_per_second" in point:
            name = next((group for prefix, group in GROUPS.items() if key.startswith(prefix)), title)
            budget = title.rpartition(" ")[2]
            label = budget if budget.endswith("%") else ""
            series.setdefault(name, []).append(
                speed_point(point["peak_bytes"] / MIB, point["tokens_per_second"], label)
            )
    path = ledger.settings.output.with_suffix(".svg")
    curves(path, series, "peak of a step, MiB", "tokens/s", joined=False, from_zero=True)


# Comparisons of a curve of (peak, speed) with a point: speed at equal peak, and peak at equal speed.


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
