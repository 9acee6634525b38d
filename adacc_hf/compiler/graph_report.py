"""A run with torch.compile reported and explained: what each region's plan does with each tensor, and what happened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.document import ACTION_COLORS, Figure, Heading, Paragraph, Part, Table
from adacc_hf.reports.plots import FONT, draw_action_legend, matplotlib_module, new_figure, to_png, unit_of
from adacc_hf.reports.report import Record, event_parts, fallback_parts, percent, write_document
from adacc_hf.reports.timeline import timeline_parts

if TYPE_CHECKING:
    from adacc_hf.compiler.compiled_policy import CompiledPolicy, GraphTensor, RegionPlan

GRAPHS_TITLE = "Adacc report: compiled graphs"
NUMBERS = frozenset({"bytes", "stored"})
BAR_INCHES = 0.26


def write_compiled_report(folder: str | Path, *, policy: CompiledPolicy, history: Sequence[Record] = ()) -> Path:
    """Write report.md, report.html and their pictures into `folder`; returns the path of report.md.

    `history` is `AdaccCallback.history`. Raises NotADirectoryError if `folder` is a file and ImportError without
    matplotlib. Nothing is written then.
    """
    parts = [Heading(GRAPHS_TITLE, level=1), *_summary(policy), *_map(policy), *fallback_parts(history)]
    parts += timeline_parts(history)
    return write_document(folder, GRAPHS_TITLE, [*parts, *_tensors(policy), *event_parts(history)])


def _summary(policy: CompiledPolicy) -> list[Part]:
    rows = [
        (
            plan.region,
            "-" if plan.calls is None else str(plan.calls),
            format_bytes(plan.plain_bytes),
            format_bytes(plan.stored_bytes),
            percent(plan.stored_bytes, plan.plain_bytes),
            format_bytes(plan.peak_bytes),
            "-" if plan.code_bytes is None else format_bytes(max(plan.code_bytes)),
            f"{plan.overhead_ms:.2f}",
            f"as torch.compile cuts it: {plan.reason}" if plan.reason else "planned",
        )
        for plan in policy.regions
    ]
    headers = (
        "region",
        "calls",
        "torch.compile stores",
        "stored",
        "of that",
        "held at most",
        "code",
        "overhead ms",
        "how",
    )
    return [
        Paragraph(f"{describe_compiled(policy)}."),
        Table(headers, rows, numbers=frozenset(headers[1:-1])),
        Paragraph(
            "A region is a graph that torch.compile makes; calls are those of one micro-batch. Stored is what one "
            "call's forward hands to its backward, parameters and the batch left out; held at most has what is "
            "recomputed "
            "meanwhile; code is the most that forward or backward has live by the code that Inductor made, temporaries "
            "and gradients included. Overhead is replay, storing and codecs, as priced."
        ),
    ]


def _map(policy: CompiledPolicy) -> list[Part]:
    groups = _groups(policy)
    if not groups:
        return []
    return [
        Heading("Policy map"),
        Paragraph(
            "Bytes of what torch.compile or this policy stores, by the module that makes it and what becomes of it."
        ),
        Figure("policy_map.png", "Bytes of each block's tensors by action", _draw_map(groups)),
    ]


def _groups(policy: CompiledPolicy) -> dict[str, dict[str, int]]:
    """Bytes by action of each block, or of what lies outside of blocks, in the order of forward."""
    groups: dict[str, dict[str, int]] = {}
    for plan in dict.fromkeys(policy.in_force):
        calls = f", {plan.calls} calls" if (plan.calls or 1) > 1 else ""
        for tensor in plan.tensors:
            label = f"{_block(tensor.module) or 'inputs and other'} (region {plan.region}{calls})"
            actions = groups.setdefault(label, dict.fromkeys(ACTION_COLORS, 0))
            actions[tensor.action] += tensor.nbytes * (plan.calls or 1)
    return groups


def _block(module: str) -> str:
    """The path up to its first number, else its first name: "transformer.h.0.mlp" -> "transformer.h.0"."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return numbered.group() if numbered else module.partition(".")[0]


def _draw_map(groups: dict[str, dict[str, int]]) -> bytes:
    """A bar for each group, as PNG."""
    scale, unit = unit_of(max(sum(actions.values()) for actions in groups.values()))
    with matplotlib_module().rc_context(FONT):
        figure = new_figure(BAR_INCHES * len(groups) + 1.2)
        axis = figure.subplots()
        left = [0.0] * len(groups)
        for action, color in ACTION_COLORS.items():
            widths = [actions[action] / scale for actions in groups.values()]
            axis.barh(list(groups), widths, left=left, color=color, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel(f"bytes [{unit}]")
        axis.spines[["top", "right"]].set_visible(False)
        draw_action_legend(figure)
        return to_png(figure)


def _tensors(policy: CompiledPolicy) -> list[Part]:
    parts: list[Part] = [Heading("Tensors")]
    for plan in policy.regions:
        parts += [Heading(_title(plan), level=3), Table(HEADERS, tensor_rows(plan), NUMBERS)]
    return parts


def _title(plan: RegionPlan) -> str:
    return f"{plan.summary()}{describe_calls(plan)}"


# What a policy for compiled graphs does with each tensor, region by region.

HEADERS = ("module", "tensor", "shape", "bytes", "action", "codec", "stored")


def explain_compiled(policy: CompiledPolicy) -> str:
    """The whole policy in one line, then for each region its plan and a line per tensor."""
    lines = [describe_compiled(policy)]
    for plan in policy.regions:
        rows = tensor_rows(plan)
        lines += ["", f"{plan.summary()}{describe_calls(plan)}"]
        widths = [max(len(row[column]) for row in [HEADERS, *rows]) for column in range(len(HEADERS))]
        lines += [_aligned(row, widths) for row in ([HEADERS, *rows] if rows else [])]
    return "\n".join(lines)


def describe_compiled(policy: CompiledPolicy) -> str:
    """How much of what torch.compile would store is stored, and what that costs."""
    of_plain = f" ({100 * policy.stored_bytes / policy.plain_bytes:.1f} %)" if policy.plain_bytes else ""
    return (
        f"{len(policy.regions)} compiled regions, {len(policy.in_force)} calls per micro-batch, each allowed "
        f"{describe_allowed(policy)}: {format_bytes(policy.stored_bytes)} of {format_bytes(policy.plain_bytes)} "
        f"stored{of_plain}, overhead {policy.overhead_ms:.2f} ms"
    )


def describe_allowed(policy: CompiledPolicy) -> str:
    if policy.budget_bytes is not None:
        return format_bytes(policy.budget_bytes)
    return "the least possible" if policy.share is None else f"{policy.share:.3g} of its bytes"


def describe_calls(plan: RegionPlan) -> str:
    """Nothing for a region that is called once, as most are, or whose calls were not counted."""
    if plan.calls in (None, 1):
        return ""
    return "; no longer called" if plan.calls == 0 else f"; called {plan.calls} times"


def tensor_rows(plan: RegionPlan) -> list[tuple[str, ...]]:
    """One row of cells under `HEADERS` per tensor."""
    return [_cells(tensor) for tensor in plan.tensors]


def _cells(tensor: GraphTensor) -> tuple[str, ...]:
    return (
        tensor.module or "-",
        f"{tensor.name} ({tensor.operator.removeprefix('aten.')})",
        f"{tensor.dtype}{list(tensor.shape)}",
        format_bytes(tensor.nbytes),
        tensor.action,
        tensor.codec or "",
        format_bytes(tensor.stored_bytes) if tensor.stored_bytes else "-",
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
