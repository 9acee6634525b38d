"""What is decided for compiled regions, for people to read, and the files that keep it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import fx

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import RecordFolder, read_json, write_json
from adacc_hf.artifacts.policy import COMPILED_FORMAT, RECOMPUTE, Action, Choice
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.compiler.functorch import cache_dir, inductor_config, maker_of
from adacc_hf.compiler.joint_graph import JointGraph
from adacc_hf.torch_glue.private import COMPILED_MODULE

FORMAT_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """What was decided for one compiled region; bytes are those of the traced example's sizes."""

    digest: str
    """Of the region's joint graph."""
    region: str = ""
    """The number of the compiled function, which it has at all the sizes that it is compiled for; where the function is
    split into several graphs, as DDP does, with the number of the graph."""
    calls: int | None = None
    """How often the forward of one micro-batch calls it, which is more than once where blocks are compiled one by one;
    None if that was not counted."""
    plain_bytes: int = 0
    """What torch's own partitioner would hand to backward, parameters left out."""
    stored_bytes: int = 0
    peak_bytes: int = 0
    """Most that is live of it in backward while a part of it is recomputed: what is stored up to there, and that
    part."""
    backward_bytes: int = 0
    """Most that its backward has live in all, temporaries and gradients with it, as `live_bytes` reads the graph."""
    code_bytes: tuple[int, int] | None = None
    """The same of its forward, what it is given not counted, and of its backward, as is found in the compiled
    code; None until that was looked at, or where it cannot be."""
    overhead_ms: float = 0.0
    """What replay, storing and codecs take beyond those of torch's own partition, as priced; below 0 where they take
    less."""
    stored: tuple[tuple[str, Choice], ...] = ()
    """How each value that is handed over is stored, by the name of its node; the others are recomputed."""
    tensors: tuple[GraphTensor, ...] = ()
    """What becomes of each tensor that torch's partitioner or this plan hands over; no plan is followed by it."""
    reason: str = ""
    """Why torch's own partition was taken, if it was."""

    def summary(self) -> str:
        """One line for a log."""
        if self.reason:
            return f"region {self.region}: as torch.compile cuts it, {self.reason}"
        num_coded = sum(choice.action is Action.COMPRESS for _, choice in self.stored)
        return (
            f"region {self.region}: {format_bytes(self.stored_bytes)} of {format_bytes(self.plain_bytes)} stored in "
            f"{len(self.stored) - num_coded} tensors retained and {num_coded} compressed; overhead "
            f"{self.overhead_ms:.2f} ms"
        )

    def to_json(self) -> dict[str, Any]:
        stored = {name: choice.to_json() for name, choice in self.stored}
        return {**vars(self), "stored": stored, "tensors": [vars(tensor) for tensor in self.tensors]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RegionPlan:
        stored = tuple((name, Choice.from_json(choice)) for name, choice in record["stored"].items())
        tensors = tuple(GraphTensor.from_json(tensor) for tensor in record["tensors"])
        code_bytes = record.get("code_bytes")  # not in files of earlier versions
        code_bytes = None if code_bytes is None else tuple(code_bytes)
        return cls(**{**record, "stored": stored, "tensors": tensors, "code_bytes": code_bytes})


@dataclass(frozen=True, kw_only=True)
class CompiledPolicy:
    """The plans of all regions of a run that were compiled so far, and what they were made for."""

    share: float | None
    """Fraction of plain bytes that each region was allowed; None: the least possible, or `budget_bytes`."""
    budget_bytes: int | None = None
    """What each region was allowed to hold for its backward, where that was given in bytes."""
    settled_for: str | float | int | None = None
    """The `memory_budget` of a run whose steps keep to it under this policy; None while that is being found out."""
    regions: tuple[RegionPlan, ...] = ()

    def allowed_bytes(self, plain_bytes: int) -> int | None:
        """What a region of `plain_bytes` may hold for its backward; None: the least possible."""
        if self.budget_bytes is not None or self.share is None:
            return self.budget_bytes
        return int(self.share * plain_bytes)

    @property
    def in_force(self) -> tuple[RegionPlan, ...]:
        """The plan of every call that a micro-batch makes, in their order as far as it is known.

        Where calls were not counted: each region once, if it was compiled for several sizes by its last plan.
        """
        counted = [(plan, plan.calls) for plan in self.regions if plan.calls]
        if counted:
            return tuple(plan for plan, calls in counted for _ in range(calls))
        return tuple({plan.region: plan for plan in self.regions}.values())

    @property
    def plain_bytes(self) -> int:
        return sum(plan.plain_bytes for plan in self.in_force)

    @property
    def stored_bytes(self) -> int:
        return sum(plan.stored_bytes for plan in self.in_force)

    @property
    def peak_bytes(self) -> int:
        """The regions run backward one after the other, each beside what those before it store."""
        return self._most([plan.peak_bytes for plan in self.in_force])

    @property
    def backward_bytes(self) -> int:
        """As `peak_bytes`, with temporaries and the region's own gradients."""
        return self._most([plan.backward_bytes for plan in self.in_force])

    @property
    def code_bytes(self) -> int | None:
        """Most that a step has live beside what is there before it, by the code of all regions; None where one is not
        known."""
        plans = self.in_force
        found = [max(plan.code_bytes) for plan in plans if plan.code_bytes is not None]
        return self._most(found) if found and len(found) == len(plans) else None

    def _most(self, live_bytes: Sequence[int]) -> int:
        """The most of what is live in each region's backward, beside what those before it store."""
        stored = [0, *accumulate(plan.stored_bytes for plan in self.in_force)]
        return max((before + live for before, live in zip(stored, live_bytes, strict=False)), default=0)

    @property
    def overhead_ms(self) -> float:
        return sum(plan.overhead_ms for plan in self.in_force)

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON, atomically."""
        regions = [plan.to_json() for plan in self.regions]
        header = {"format": COMPILED_FORMAT, "version": FORMAT_VERSION}
        made_for = {name: getattr(self, name) for name in ("share", "budget_bytes", "settled_for")}
        write_json(path, {**header, **made_for, "regions": regions})

    @classmethod
    def load(cls, path: str | Path) -> CompiledPolicy:
        """Read what `save` wrote. Raises FileNotFoundError, or PolicyMismatchError if it is not a whole such file."""
        record = read_json(path, PolicyMismatchError, "compiled policy")
        try:
            if (record["format"], record["version"]) != (COMPILED_FORMAT, FORMAT_VERSION):
                raise ValueError(f"format {record['format']!r}, version {record['version']!r}")
            regions = tuple(RegionPlan.from_json(region) for region in record["regions"])
            settled_for = record.get("settled_for")  # not in files of earlier versions
            return cls(
                share=record["share"], budget_bytes=record["budget_bytes"], settled_for=settled_for, regions=regions
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyMismatchError(
                f"{path} is not a whole compiled policy of version {FORMAT_VERSION} ({type(error).__name__}: {error}): "
                f"delete it, and the regions are planned again"
            ) from error


def graph_digest(module: fx.GraphModule, num_outputs: int) -> str:
    """What tells one joint graph from another: operators, what they read, dtypes and sizes."""
    lines = [str(num_outputs)]
    for node in module.graph.nodes:
        value = node.meta.get("val")
        layout = f"{tuple(value.shape)} {value.stride()} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {layout}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def plan_for(joint: JointGraph, plan: RegionPlan) -> dict[int, Choice]:
    """The choices of `plan` by value index. Raises PolicyMismatchError where the graph has no such value."""
    index = {node.name: number for number, node in enumerate(joint.nodes)}
    unknown = [name for name, _ in plan.stored if name not in index]
    if unknown:
        raise PolicyMismatchError(f"the policy for region {plan.region} stores {unknown[0]}, which its graph has not")
    return {index[name]: choice for name, choice in plan.stored}


# What a region's plan does with each tensor, for people to read: explain and reports need no graph.


@dataclass(frozen=True, kw_only=True)
class GraphTensor:
    """A tensor that torch's partitioner would hand to backward, or that ours does."""

    name: str
    """Of its node."""
    module: str
    """Path of the module whose forward makes it, within the region; "" where that is not known."""
    operator: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    action: str
    codec: str | None = None
    stored_bytes: int = 0
    """What backward gets of it; 0 if it is recomputed."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> GraphTensor:
        return cls(**{**record, "shape": tuple(record["shape"])})


def graph_tensors(
    joint: JointGraph, plain: Iterable[int], stored: Mapping[int, Choice], stored_bytes: Mapping[int, int]
) -> tuple[GraphTensor, ...]:
    """The values in `plain`, which torch would save, and those that are `stored`, in the order they are made."""
    return tuple(
        _tensor(joint, value, stored.get(value, RECOMPUTE), stored_bytes.get(value, 0))
        for value in sorted({*plain, *stored})
    )


def _tensor(joint: JointGraph, value: int, choice: Choice, stored_bytes: int) -> GraphTensor:
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
    """The path of the innermost module that a node was traced in: "L['self'].transformer.h.0" -> "transformer.h.0"."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = path.partition("]")[2].lstrip(".") if path.startswith("L[") else path
    return ".".join(part for part in path.split(".") if part not in ("module", COMPILED_MODULE))


# Plans of earlier runs, beside Inductor's code: prices are measured, and a plan made anew would miss that code.


class PlanStore:
    """One file per region and way of deciding about it; it goes when torch's caches are deleted.

    Nothing is kept or found where Inductor's cache of graphs is off.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """`folder` is by default in torch's cache directory."""
        folder = Path(cache_dir()) / "adacc" if folder is None else Path(folder)
        self._records = RecordFolder(folder, "plan", FORMAT_VERSION, PolicyMismatchError)

    def load(self, decider: str, digest: str) -> RegionPlan | None:
        """The plan that `decider`, the partitioner's uuid, made for the graph of that digest; None if there is none."""
        record = self._records.get(_name(decider, digest)) if _is_on() else None
        return None if record is None else RegionPlan.from_json(record)

    def save(self, decider: str, plan: RegionPlan) -> None:
        if _is_on():
            self._records.put(_name(decider, plan.digest), plan.to_json())


def _name(decider: str, digest: str) -> str:
    return f"{digest}-{hashlib.sha256(decider.encode()).hexdigest()[:16]}"


def _is_on() -> bool:
    return inductor_config.fx_graph_cache and not inductor_config.force_disable_caches
