"""Policy of a run with torch.compile: one plan per compiled graph, the policy's files, and descriptions for reports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import fx

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import (
    COMPILED_FILE,
    COMPILED_FORMAT,
    fields_of,
    from_fields,
    from_labelled,
    labelled,
    policy_file,
    read_json,
    write_json,
)
from adacc_hf.artifacts.policy import RECOMPUTE, Action, Choice
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.compiler.functorch import cache_dir, inductor_config, maker_of
from adacc_hf.compiler.joint_graph import JointGraph
from adacc_hf.torch_glue.private import COMPILED_MODULE

FORMAT_VERSION = 5


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """Plan of one region (compiled graph) of torch.compile: the values that forward stores for backward. All numbers of
    bytes are computed with the sizes of the traced example."""

    digest: str
    """Digest of the region's joint graph."""
    region: str = ""
    """Number of the compiled function, the same for all sizes that the function is compiled for. If the function is
    split into several graphs, for example by DDP, the graph's number is appended."""
    calls: int | None = None
    """Number of calls of the region in the forward of one micro-batch: more than 1 if equal blocks are compiled one by
    one. None before the calls are counted."""
    plain_bytes: int = 0
    """Bytes that torch's own partitioner would store for backward, parameters excluded."""
    stored_bytes: int = 0
    peak_bytes: int = 0
    """Maximum of the live bytes in backward while a segment is recomputed: the values stored up to the segment's end,
    and its recomputed values."""
    overhead_ms: float = 0.0
    """Estimated time for replay, storing and codecs, minus the estimated time under torch's own partition. The overhead
    can be negative."""
    stored: tuple[tuple[str, Choice], ...] = ()
    """Names of the stored values' nodes, each with its choice: retain or a codec. All other values are recomputed."""
    tensors: tuple[GraphTensor, ...] = ()
    """Description of each tensor that torch's partitioner or this plan stores, for reports only."""
    reason: str = ""
    """Reason for using torch's own partition instead of a plan, or ""."""

    def summary(self) -> str:
        """Return a one-line description of the plan for logs."""
        if self.reason:
            return f"region {self.region}: partitioned by torch.compile: {self.reason}"
        num_compressed = sum(choice.action is Action.COMPRESS for _, choice in self.stored)
        return (
            f"region {self.region}: {format_bytes(self.stored_bytes)} of {format_bytes(self.plain_bytes)} stored in "
            f"{len(self.stored) - num_compressed} tensors retained and {num_compressed} compressed; overhead "
            f"{self.overhead_ms:.2f} ms"
        )


@dataclass(frozen=True, kw_only=True)
class CompiledPolicy:
    """Plans of all graphs (regions) that a run with torch.compile has compiled so far, and their budget."""

    share: float | None
    """Fraction of a region's `plain_bytes` that the region (compiled graph) may store, the same for all regions. None
    means that `budget_bytes` applies instead. If `share` and `budget_bytes` are None, each region stores the least
    possible."""
    budget_bytes: int | None = None
    """Bytes that each region (compiled graph) may hold for its backward, if the budget was given in bytes."""
    settled_for: str | float | int | None = None
    """`memory_budget` for which a run has finished adjusting `share`. None while `share` is being adjusted."""
    regions: tuple[RegionPlan, ...] = ()

    def allowed_bytes(self, plain_bytes: int) -> int | None:
        """Return the limit in bytes for a region that stores `plain_bytes` under plain torch.compile, or None if the
        region must store the least possible. A share limits the stored bytes, a budget in bytes the stored and the
        recomputed values."""
        if self.budget_bytes is not None or self.share is None:
            return self.budget_bytes
        return int(self.share * plain_bytes)

    @property
    def call_plans(self) -> tuple[RegionPlan, ...]:
        """Plans of the regions that a micro-batch calls, one for each call, in call order. If the calls were not
        counted, each region is assumed to be called once, with its most recently compiled plan."""
        counted = [(plan, plan.calls) for plan in self.regions if plan.calls]
        if counted:
            return tuple(plan for plan, calls in counted for _ in range(calls))
        return tuple({plan.region: plan for plan in self.regions}.values())

    @property
    def plain_bytes(self) -> int:
        return sum(plan.plain_bytes for plan in self.call_plans)

    @property
    def stored_bytes(self) -> int:
        return sum(plan.stored_bytes for plan in self.call_plans)

    @property
    def peak_bytes(self) -> int:
        """Maximum of the live bytes during the backward of any compiled region. The values that earlier regions store
        are included."""
        plans = self.call_plans
        stored = [0, *accumulate(plan.stored_bytes for plan in plans)]
        return max((before + plan.peak_bytes for before, plan in zip(stored, plans, strict=False)), default=0)

    @property
    def overhead_ms(self) -> float:
        return sum(plan.overhead_ms for plan in self.call_plans)

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON, atomically."""
        write_json(path, labelled(fields_of(self), COMPILED_FORMAT, FORMAT_VERSION))

    @classmethod
    def load(cls, path: str | Path) -> CompiledPolicy:
        """Read a policy from a file written by `save`, or from the folder of a run or a checkpoint with such a file.
        Raises FileNotFoundError, or PolicyMismatchError if the file is invalid."""
        record = read_json(policy_file(path, (COMPILED_FILE,)), PolicyMismatchError, "compiled policy")
        return from_labelled(
            cls, record, COMPILED_FORMAT, FORMAT_VERSION, PolicyMismatchError, source=str(path),
            advice="delete it to plan the regions",
        )  # fmt: skip


def graph_digest(module: fx.GraphModule, num_outputs: int) -> str:
    """Return a digest of a joint graph's operators, arguments, dtypes and sizes, to recognize an equal graph."""
    lines = [str(num_outputs)]
    for node in module.graph.nodes:
        value = node.meta.get("val")
        layout = f"{tuple(value.shape)} {value.stride()} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {layout}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def plan_for(joint: JointGraph, plan: RegionPlan) -> dict[int, Choice]:
    """Return the choices of `plan` for the stored values of a compiled graph, by the values' indices in the graph.
    Raises PolicyMismatchError if the graph lacks a stored value."""
    index = {node.name: number for number, node in enumerate(joint.nodes)}
    unknown = [name for name, _ in plan.stored if name not in index]
    if unknown:
        raise PolicyMismatchError(
            f"the policy for region {plan.region} stores {unknown[0]}, which the region's graph does not contain: use "
            f"the policy with the model and batch sizes that it was made for"
        )
    return {index[name]: choice for name, choice in plan.stored}


# Description of each tensor under a region's plan, so that `adacc explain` and reports need no graph.


@dataclass(frozen=True, kw_only=True)
class GraphTensor:
    """Tensor of a compiled graph that torch's partitioner or the graph's plan stores for backward."""

    name: str
    """Name of the tensor's node."""
    module: str
    """Path, within the compiled function, of the module whose forward computes the tensor, or "" if unknown."""
    operator: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str
    codec: str | None = None
    stored_bytes: int = 0
    """Bytes stored for backward, or 0 if the tensor is recomputed."""


def graph_tensors(
    joint: JointGraph, plain: Iterable[int], stored: Mapping[int, Choice], stored_bytes: Mapping[int, int]
) -> tuple[GraphTensor, ...]:
    """Describe the tensors of a compiled graph that torch or a plan stores for backward, in the order of forward.
    `plain` are the values that torch's partitioner would store, and `stored` the values that the plan stores."""
    return tuple(
        _graph_tensor(joint, value, stored.get(value, RECOMPUTE), stored_bytes.get(value, 0))
        for value in sorted({*plain, *stored})
    )


def _graph_tensor(joint: JointGraph, value: int, choice: Choice, stored_bytes: int) -> GraphTensor:
    record, node = joint.kind.values[value], joint.nodes[value]
    maker = maker_of(node)
    return GraphTensor(
        name=record.name,
        module=module_path(node),
        operator=str(maker.target) if maker.op == "call_function" else "input",
        shape=record.shape,
        dtype=record.dtype,
        nbytes=record.nbytes,
        action=choice.action.value,
        codec=choice.codec if choice.action is Action.COMPRESS else None,
        stored_bytes=stored_bytes,
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that contains the node, such as "transformer.h.0", or "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = path.partition("]")[2].lstrip(".") if path.startswith("L[") else path
    return ".".join(part for part in path.split(".") if part not in ("module", COMPILED_MODULE))


# Plans of earlier runs are stored next to Inductor's code. Costs are measured again in each run, so a new plan could
# differ from the stored plan and miss the cached code.


class PlanStore:
    """Cache on disk for the plans of compiled graphs, one file per graph and `AdaccPartitioner._decision_key`. By
    default the files are in torch's cache directory, and are deleted with torch's caches. If Inductor's graph cache is
    off, nothing is stored or loaded."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """Store the plans in `folder`, by default "adacc" in torch's cache directory."""
        self._folder = Path(cache_dir()) / "adacc" if folder is None else Path(folder)

    def load(self, decision_key: str, digest: str) -> RegionPlan | None:
        """Return the stored plan for the graph with this `digest`, or None. A plan that was made with different
        settings, or by other code, has a different `decision_key`, and is not returned."""
        try:
            record = read_json(self._path(decision_key, digest), PolicyMismatchError, "plan")
        except FileNotFoundError:
            return None
        return from_fields(RegionPlan, record) if _is_graph_cache_on() else None

    def save(self, decision_key: str, plan: RegionPlan) -> None:
        if _is_graph_cache_on():
            write_json(self._path(decision_key, plan.digest), plan)

    def _path(self, decision_key: str, digest: str) -> Path:
        return self._folder / f"{digest}-{hashlib.sha256(decision_key.encode()).hexdigest()[:16]}.plan.json"


def _is_graph_cache_on() -> bool:
    return inductor_config.fx_graph_cache and not inductor_config.force_disable_caches
