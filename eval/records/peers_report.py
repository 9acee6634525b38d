"""Report of the comparison with peers, as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Return a table of all points, a table of those at equal peak, and the reasons of points without measurement."""
    info, titles = ledger.run_info, ledger.summary["titles"]
    subject = info["subject"]
    heading = (
        f"{subject['preset']}, batch {subject['batch']} x {subject['tokens']} tokens, {subject['precision']}; median "
        f"(20th to 80th percentile) of {info['rounds']} whole training steps, each method in a process of its own. "
        "Gradients are compared with plain training's, or, if compiled, with those that torch.compile computes without "
        "a budget under the same dropout masks: relative L2 error"
    )
    parts = [heading, _points_table(ledger)]
    if matched_rows := _matched_rows(ledger):
        parts += [
            "Adacc, whose budget is the measured peak of another method, compared with that method:",
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
        rows.append({"method": title, **describe(point), **share, "gradients": _gradients(point.get("gate", {}))})
    return markdown_table(rows)


def matched_key(method: str, peer: str) -> str:
    """Return the key of the point of `method`, one of Adacc's, whose budget is the peak of `peer`."""
    return f"{method}_within_{peer}"


def _matched_rows(ledger: Ledger) -> list[dict[str, str]]:
    """Return a row for each point of Adacc whose budget is the peak of another method."""
    rows, titles = [], ledger.summary["titles"]
    for key, title in titles.items():
        _, _, peer = key.partition("_within_")
        pair = [ledger.points.get(each, {}) for each in (peer, key)]
        if peer and all("tokens_per_second" in point for point in pair):
            other, own = (point["tokens_per_second"]["median"] for point in pair)
            rows.append(
                {
                    "other method": titles[peer],
                    "its tokens/s": f"{other:.0f}",
                    "its peak": format_bytes(pair[0]["peak_bytes"]),
                    "Adacc": title.partition(", at the peak")[0],
                    "Adacc's peak": format_bytes(pair[1]["peak_bytes"]),
                    "Adacc's tokens/s": f"{own:.0f}",
                    "ratio": f"{own / other:.2f}x",
                }
            )
    return rows


def _gradients(gate: Mapping[str, Any]) -> str:
    """Return in words what the check of a method's gradients found (`trial.check`)."""
    error = gate.get("gradient_error")
    if not error:
        return "" if error is None else "bit-equal"
    return "equal but for rounding" if error <= gate.get("rounding", 0.0) else f"off by {error:.2g}"


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
