"""The comparison with peers as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from adacc_hf.eval.ledger import Ledger
from adacc_hf.eval.plots import curves
from adacc_hf.eval.records import markdown_table
from adacc_hf.eval.tradeoff import Comparison
from adacc_hf.eval.trial import describe

GROUPS = {"compile": "torch.compile", "xformers": "xformers", "adacc_lossless": "Adacc, lossless", "adacc": "Adacc"}
"""What is one line in the plot: prefixes of keys, the longer first."""

MIB = 2**20


def report_text(ledger: Ledger, titles: Mapping[str, str], comparisons: Sequence[Comparison]) -> str:
    """A table of all points, one of what is read off them, and the reasons of those that have none."""
    info = ledger.run_info
    subject = info["subject"]
    heading = (
        f"{subject['preset']}, batch {subject['batch']} x {subject['tokens']} tokens, {subject['precision']}; median "
        f"(20th to 80th percentile) of {info['rounds']} whole training steps, each method in a process of its own"
    )
    base = ledger.points.get("plain", {}).get("tokens_per_second", {}).get("median")
    rows = []
    for key, title in titles.items():
        point = ledger.points[key]
        own = point.get("tokens_per_second", {}).get("median")
        share = {"x plain": f"{own / base:.2f}" if own and base else ""}
        rows.append({"method": title, **describe(point), **share})
    reasons = [f"- {titles[key]}: {p['reason']}" for key, p in ledger.points.items() if "reason" in p]
    parts = [heading, markdown_table(rows)]
    if comparisons:
        parts += [
            "Adacc beside each peer, interpolated linearly between Adacc's points (plain training is one of them); "
            "empty where Adacc's points do not reach:",
            markdown_table([_comparison(row, titles) for row in comparisons]),
        ]
    return "\n\n".join([*parts, *(["Not measured:", "\n".join(reasons)] if reasons else [])]) + "\n"


def _comparison(row: Comparison, titles: Mapping[str, str]) -> dict[str, str]:
    return {
        "peer": titles[row.peer] + (" (compiled)" if row.compiled else ""),
        "Adacc's tokens/s at its peak": "" if row.speed_ratio is None else f"{row.speed_ratio:.2f}x",
        "Adacc's peak at its tokens/s": "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}x",
    }


def save_plot(ledger: Ledger, path: Path, titles: Mapping[str, str]) -> None:
    """Tokens per second against peak; points of one method at several settings are joined."""
    series: dict[str, list[tuple[float, float]]] = {}
    for key, title in titles.items():
        point = ledger.points[key]
        if "tokens_per_second" in point:
            name = next((group for prefix, group in GROUPS.items() if key.startswith(prefix)), title)
            series.setdefault(name, []).append((point["peak_bytes"] / MIB, point["tokens_per_second"]["median"]))
    curves(path, series, "peak of a step, MiB", "tokens/s")
