"""What a policy for compiled graphs does with each tensor, region by region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacc_hf.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.partitioner.graph_tensors import GraphTensor
    from adacc_hf.partitioner.region import CompiledPolicy, RegionPlan

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
