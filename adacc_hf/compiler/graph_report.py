"""Reports on runs with torch.compile: the decision for each tensor of each compiled graph, and the run's events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.tables import ACTION_COLORS, table
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.document import Figure, Part, Report
from adacc_hf.reports.plots import FONT, draw_action_legend, new_figure, plot_module, to_png, unit_of
from adacc_hf.reports.report import Record, event_parts, fallback_parts, percent, timeline_parts
from adacc_hf.reports.text_table import table_lines

if TYPE_CHECKING:
    from adacc_hf.compiler.compiled_policy import CompiledPolicy, RegionPlan

GRAPHS_TITLE = "Adacc report: compiled graphs"
NUMBERS = frozenset({"bytes", "stored"})
BAR_INCHES = 0.26


def compiled_report(*, policy: CompiledPolicy, history: Sequence[Record] = ()) -> Report:
    """Return the report of a policy for compiled graphs. `history` is `AdaccCallback.history`. Raises ImportError if
    matplotlib is not installed."""
    parts: list[Part] = [
        *_region_summary(policy),
        *_compiled_policy_map(policy),
        *fallback_parts(history),
        *timeline_parts(history),
        "## Tensors",
    ]
    for plan in policy.regions:
        parts += [f"### {plan.summary()}{describe_calls(plan)}", table(HEADERS, tensor_rows(plan), NUMBERS)]
    return Report(title=GRAPHS_TITLE, parts=(*parts, *event_parts(history)))


def _region_summary(policy: CompiledPolicy) -> list[Part]:
    rows = [
        (
            plan.region,
            "-" if plan.calls is None else str(plan.calls),
            format_bytes(plan.plain_bytes),
            format_bytes(plan.stored_bytes),
            percent(plan.stored_bytes, plan.plain_bytes),
            format_bytes(plan.peak_bytes),
            f"{plan.overhead_ms:.2f}",
            f"partitioned by torch.compile: {plan.reason}" if plan.reason else "planned",
        )
        for plan in policy.regions
    ]
    headers = (
        "region",
        "calls",
        "torch.compile stores",
        "stored",
        "of torch.compile's",
        "held at most",
        "overhead ms",
        "partition",
    )
    return [
        f"{describe_compiled(policy)}.",
        table(headers, rows, numbers=headers[1:-1]),
        (
            "A region is a graph of torch.compile. Calls are per micro-batch. Stored is the size of the tensors that a "
            "call's forward stores for its backward, without parameters and the batch. Held at most adds the tensors "
            "that are recomputed at the same time. Overhead is the estimated time for replay, storing and codecs."
        ),
    ]


def _compiled_policy_map(policy: CompiledPolicy) -> list[Part]:
    groups = _module_groups(policy)
    if not groups:
        return []
    return [
        "## Policy map",
        (
            "Bytes of the tensors that torch.compile or this policy stores, by the module that computes them and by "
            "action."
        ),
        Figure("policy_map.png", "Bytes of each block's tensors by action", _draw_map(groups)),
    ]


def _module_groups(policy: CompiledPolicy) -> dict[str, dict[str, int]]:
    """Return the bytes of tensors by action, for each block or other module of each compiled graph, in forward order.
    Tensors without a module, such as inputs, share one entry per graph."""
    groups: dict[str, dict[str, int]] = {}
    for plan in dict.fromkeys(policy.call_plans):
        calls = f", {plan.calls} calls" if (plan.calls or 1) > 1 else ""
        for tensor in plan.tensors:
            label = f"{_block_of_module(tensor.module) or 'inputs and other'} (region {plan.region}{calls})"
            actions = groups.setdefault(label, dict.fromkeys(ACTION_COLORS, 0))
            actions[tensor.action] += tensor.nbytes * (plan.calls or 1)
    return groups


def _block_of_module(module: str) -> str:
    """Return the block that the module path belongs to: "transformer.h.0.mlp" -> "transformer.h.0"."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return numbered.group() if numbered else module.partition(".")[0]


def _draw_map(groups: dict[str, dict[str, int]]) -> bytes:
    scale, unit = unit_of(max(sum(actions.values()) for actions in groups.values()))
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(BAR_INCHES * len(groups) + 1.2)
        axis = figure.subplots()
        bar_starts = [0.0] * len(groups)
        for action, color in ACTION_COLORS.items():
            widths = [actions[action] / scale for actions in groups.values()]
            axis.barh(list(groups), widths, left=bar_starts, color=color, height=0.75)
            bar_starts = [start + width for start, width in zip(bar_starts, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel(f"bytes [{unit}]")
        axis.spines[["top", "right"]].set_visible(False)
        draw_action_legend(figure)
        return to_png(figure)


# Text description of each region's plan, tensor by tensor.

HEADERS = ("module", "tensor", "shape", "bytes", "action", "codec", "stored")


def explain_compiled(policy: CompiledPolicy) -> str:
    """Return the policy as text: a line for the policy, then a line and a table of tensors for each compiled graph."""
    lines = [describe_compiled(policy)]
    for plan in policy.regions:
        rows = tensor_rows(plan)
        lines += ["", f"{plan.summary()}{describe_calls(plan)}"]
        lines += table_lines([HEADERS, *rows]) if rows else []
    return "\n".join(lines)


def describe_compiled(policy: CompiledPolicy) -> str:
    """Return one line on a compiled policy: bytes stored, bytes that plain torch.compile would store, overhead."""
    stored_share = f" ({100 * policy.stored_bytes / policy.plain_bytes:.1f} %)" if policy.plain_bytes else ""
    return (
        f"{len(policy.regions)} compiled regions, {len(policy.call_plans)} calls per micro-batch, each allowed "
        f"{describe_allowed(policy)}: {format_bytes(policy.stored_bytes)} of {format_bytes(policy.plain_bytes)} "
        f"stored{stored_share}, overhead {policy.overhead_ms:.2f} ms"
    )


def describe_allowed(policy: CompiledPolicy) -> str:
    if policy.budget_bytes is not None:
        return format_bytes(policy.budget_bytes)
    return "the least possible" if policy.share is None else f"{policy.share:.3g} of its bytes"


def describe_calls(plan: RegionPlan) -> str:
    """Return the number of calls of a compiled graph in a step, as the suffix of a line. Return "" for one call, and if
    the calls were not counted."""
    if plan.calls in (None, 1):
        return ""
    return "; no longer called" if plan.calls == 0 else f"; called {plan.calls} times"


def tensor_rows(plan: RegionPlan) -> list[tuple[str, ...]]:
    """Return a table of the tensors in a region's plan, with the columns of `HEADERS`."""
    return [
        (
            tensor.module or "-",
            f"{tensor.name} ({tensor.operator.removeprefix('aten.')})",
            f"{tensor.dtype}{list(tensor.shape)}",
            format_bytes(tensor.nbytes),
            tensor.action,
            tensor.codec or "",
            format_bytes(tensor.stored_bytes) if tensor.stored_bytes else "-",
        )
        for tensor in plan.tensors
    ]
