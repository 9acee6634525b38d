"""What a backward graph has live at any time, as its operators show it, and as the code made of it runs.

Operators run in the order of the graph. What lies in memory is what products, attention and gathers read and make, what
reductions make, and gradients; all else is fused with what reads it. Inductor may run operators in another order and
fuse across a distance, so that more is live: a step's measured peak was up to 8 % above this on small models, and where
next to nothing is stored up to 16 %. What is found once the graph is compiled is exact.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.compiler.functorch import hint, is_getitem, op_types
from adacc_hf.compiler.joint_graph import is_held, nbytes_of, nodes_behind, root_of
from adacc_hf.torch_glue.private import TorchDispatchMode, tree_leaves


def most_live_bytes(graph: fx.Graph, elsewhere: Set[str]) -> int:
    """Most bytes live while `graph` runs, without the inputs named in `elsewhere`, which somebody else holds."""
    results = {root_of(node) for node in graph.find_nodes(op="output")[0].args[0] if isinstance(node, fx.Node)}
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    lying = [node for node in tensors if _lies_in_memory(node, results)]
    own = [node for node in lying if node.name not in elsewhere]
    dying = _last_reads(lying, set(own) - results)
    live = most = sum(nbytes_of(node) for node in own if node.op == "placeholder")
    for node in own:
        if node.op == "placeholder":
            continue
        freed = sorted((nbytes_of(read) for read in dying[node]), reverse=True)
        if op_types().is_fusible(node) and nbytes_of(node) in freed:  # it is written over what it reads last
            freed.remove(nbytes_of(node))
        else:
            live += nbytes_of(node)
        most = max(most, live)
        live -= sum(freed)
    return most


def _lies_in_memory(node: fx.Node, results: Set[fx.Node]) -> bool:
    if root_of(node) is not node:
        return False
    return node.op == "placeholder" or node in results or is_getitem(node) or is_held(node) or _is_reduction(node)


def _is_reduction(node: fx.Node) -> bool:
    reads = [read.meta["val"] for read in node.all_input_nodes if isinstance(read.meta.get("val"), torch.Tensor)]
    return any(hint(node.meta["val"].numel()) < hint(read.numel()) for read in reads)


def _last_reads(lying: list[fx.Node], mortal: Set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each value that lies in memory those of `mortal` that nothing later reads."""
    in_memory = set(lying)
    last: dict[fx.Node, fx.Node] = {node: node for node in lying}
    for node in lying:
        # Nodes come in their order, so the last one stays.
        last |= dict.fromkeys(nodes_behind(node.all_input_nodes, in_memory), node)
    dying = defaultdict(list)
    for node, reader in last.items():
        if node in mortal:
            dying[reader].append(node)
    return dying


# What the code that Inductor made for a graph has live at any time, found by running that code without data.
#
# Only the code shows in which order Inductor runs operators, what it fuses, writes in place, keeps for reuse and
# frees.
# It is run on tensors without storage and without its kernels, so that all is allocated and freed, and nothing
# computed.

log = logging.getLogger(__name__)

KERNELS = ("cpp_", "triton_")
"""How the names of kernels begin that Inductor generates."""
ALLOCATION = "empty_strided"
"""How the names of its functions for allocating begin."""
CHECKS = ("assert_size_stride", "assert_alignment")
CUDA_BLOCK = 512
"""Bytes that CUDA's allocator counts in."""


@dataclass(frozen=True)
class GraphInput:
    """One thing that a graph is given, of the traced example's size."""

    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
    """Size, strides and dtype of a tensor; None for a number."""
    number: int | None
    owned: bool
    """Whether it dies with its last reader, since nobody else holds it."""
    on_gpu: bool

    def make(self) -> Any:
        return self.number if self.layout is None else _empty(*self.layout)


def graph_inputs(graph: fx.Graph, owned: Set[str]) -> tuple[GraphInput, ...]:
    """What `graph` is given, as it was traced; those named in `owned` nobody else holds."""
    return tuple(_input(node, node.name in owned) for node in graph.find_nodes(op="placeholder"))


def _input(node: fx.Node, owned: bool) -> GraphInput:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        size, stride = (tuple(map(hint, numbers)) for numbers in (value.shape, value.stride()))
        return GraphInput((size, stride, value.dtype), None, owned, value.device.type == "cuda")
    return GraphInput(None, hint(value) if isinstance(value, (int, torch.SymInt)) else None, False, False)


def most_live_bytes_of_code(code: Any, inputs: Sequence[GraphInput]) -> int | None:
    """Most bytes live while `code`, what Inductor made of a graph, runs on `inputs`, of which those `owned` count.

    None where it cannot be run so: an operator of it needs data, or it is not what Inductor makes for a plain call.
    """
    call = code.__func__ if isinstance(code, MethodType) else code
    if not isinstance(call, FunctionType) or "AsyncCompile" not in call.__globals__:
        return None
    names = call.__globals__
    harmless = FunctionType(call.__code__, {**names, **_stand_ins(names)}, call.__name__)
    given = [one.make() for one in inputs]
    live = _LiveBytes(CUDA_BLOCK if any(one.on_gpu for one in inputs) else 1)
    live.count(value for value, one in zip(given, inputs, strict=True) if one.owned)
    try:
        with torch.no_grad(), live:
            harmless(*([code.__self__] if isinstance(code, MethodType) else []), given)
    except Exception as error:  # what the code calls is Inductor's own, and other for every device and release
        _say_unknown(f"{type(error).__name__}: {error}")
        return None
    return live.most


@cache
def _say_unknown(reason: str) -> None:
    """Say once per reason that the peak of compiled code is not known; it is asked for after every step."""
    log.info("Adacc: compiled code cannot be run without data (%s): its peak stays that of the graph", reason)


class _LiveBytes(TorchDispatchMode):
    """Counts bytes of the storages that it is told of, and of all that are made while it is on."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes
        self._live: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.count(result for result in tree_leaves(results) if isinstance(result, Tensor))
        return results

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Take `tensors` for live from now on, and for dead what has died meanwhile."""
        self._live = [entry for entry in self._live if not entry[0].expired()]
        known = {storage for storage, _ in self._live}
        for tensor in tensors:
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in known:
                known.add(storage)
                self._live.append((storage, self._blocks(tensor.untyped_storage().nbytes())))
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live))

    def _blocks(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes


class _Kernel:
    """Stands for a kernel, called directly or as Triton's are, and does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    run = __call__


def _stand_ins(names: Iterable[str]) -> dict[str, Any]:
    idle = {name: _Kernel() for name in names if name.startswith(KERNELS) or name in CHECKS}
    return {**idle, **{name: _empty for name in names if name.startswith(ALLOCATION)}}


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
