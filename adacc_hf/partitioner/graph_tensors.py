"""What a region's plan does with each tensor, for people to read: explain and reports need no graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from adacc_hf.partitioner.functorch import is_getitem
from adacc_hf.partitioner.joint_graph import JointGraph
from adacc_hf.policy import RECOMPUTE, Action, Choice


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
    """What backward gets of it; 0 if it is remade."""

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
    maker = node.args[0] if is_getitem(node) else node
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
    return ".".join(part for part in path.split(".") if part not in ("module", "_orig_mod"))
