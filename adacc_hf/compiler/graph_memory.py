"""Peak of live bytes of a compiled graph: estimated from its operators, or measured by running its generated code.

The estimate runs operators in the order of the graph. It assumes that these tensors are written to memory: inputs and
results of matrix products, attention and gathers, results of reductions, and gradients. All other values are fused with
their readers. Inductor may reorder operators, and may fuse operators that are far apart in the graph. Therefore the
real peak can be higher. A step's measured peak was up to 8 % above the estimate on small models, and up to 16 % above
if almost no activations are stored. The measurement on the generated code is exact.
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
from adacc_hf.compiler.joint_graph import is_materialized, nbytes_of, root_of, source_nodes
from adacc_hf.torch_glue.private import TorchDispatchMode, tree_leaves


def most_live_bytes(graph: fx.Graph, elsewhere: Set[str]) -> int:
    """Return the peak of live bytes while `graph` runs, estimated from its operators. Inputs named in `elsewhere` are
    not counted, because code outside the graph keeps these inputs alive anyway."""
    results = {root_of(node) for node in graph.find_nodes(op="output")[0].args[0] if isinstance(node, fx.Node)}
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    buffers = [node for node in tensors if _is_buffer_node(node, results)]
    own = [node for node in buffers if node.name not in elsewhere]
    last_reads = _last_reads(buffers, set(own) - results)
    live = most = sum(nbytes_of(node) for node in own if node.op == "placeholder")
    for node in own:
        if node.op == "placeholder":
            continue
        freed_bytes = sorted((nbytes_of(read) for read in last_reads[node]), reverse=True)
        if op_types().is_fusible(node) and nbytes_of(node) in freed_bytes:  # the result reuses its input's buffer
            freed_bytes.remove(nbytes_of(node))
        else:
            live += nbytes_of(node)
        most = max(most, live)
        live -= sum(freed_bytes)
    return most


def _is_buffer_node(node: fx.Node, results: Set[fx.Node]) -> bool:
    if root_of(node) is not node:
        return False
    is_stored = node.op == "placeholder" or node in results or is_getitem(node)
    return is_stored or is_materialized(node) or _is_reduction_node(node)


def _is_reduction_node(node: fx.Node) -> bool:
    reads = [read.meta["val"] for read in node.all_input_nodes if isinstance(read.meta.get("val"), torch.Tensor)]
    return any(hint(node.meta["val"].numel()) < hint(read.numel()) for read in reads)


def _last_reads(buffers: list[fx.Node], freeable: Set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return a dict from each buffer to the nodes that can be freed once this buffer is computed. These are the nodes
    of `freeable` whose last read is for this buffer."""
    in_memory = set(buffers)
    last: dict[fx.Node, fx.Node] = {node: node for node in buffers}
    for node in buffers:
        # Buffers are in graph order, so later readers overwrite earlier ones.
        last |= dict.fromkeys(source_nodes(node.all_input_nodes, in_memory), node)
    last_reads = defaultdict(list)
    for node, reader in last.items():
        if node in freeable:
            last_reads[reader].append(node)
    return last_reads


# Peak of live bytes of the code that Inductor generated for a graph, measured by running the code without data.
#
# Only the generated code shows in which order Inductor runs operators, and which buffers it fuses, reuses and frees.
# The code runs on tensors without storage and with its kernels replaced, so all buffers are allocated and freed but
# nothing is computed.

log = logging.getLogger(__name__)

KERNELS = ("cpp_", "triton_")
"""Name prefixes of the kernels that Inductor generates."""
ALLOCATION = "empty_strided"
"""Name prefix of Inductor's allocation functions."""
CHECKS = ("assert_size_stride", "assert_alignment")
CUDA_BLOCK = 512
"""Granularity of CUDA's allocator in bytes."""


@dataclass(frozen=True)
class GraphInput:
    """Input of a compiled graph, with the sizes of the traced example."""

    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
    """Size, strides and dtype of the input, or None if the input is a number."""
    number: int | None
    owned: bool
    """True if no code outside the graph keeps the tensor alive. The graph's code then frees the tensor after its last
    use."""
    on_gpu: bool

    def make(self) -> Any:
        return self.number if self.layout is None else _empty_on_meta(*self.layout)


def graph_inputs(graph: fx.Graph, owned: Set[str]) -> tuple[GraphInput, ...]:
    """Return the inputs of `graph`. `owned` contains the names of the inputs that no code outside the graph keeps
    alive."""
    return tuple(_graph_input(node, node.name in owned) for node in graph.find_nodes(op="placeholder"))


def _graph_input(node: fx.Node, owned: bool) -> GraphInput:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        size, stride = (tuple(map(hint, numbers)) for numbers in (value.shape, value.stride()))
        return GraphInput((size, stride, value.dtype), None, owned, value.device.type == "cuda")
    return GraphInput(None, hint(value) if isinstance(value, (int, torch.SymInt)) else None, False, False)


def most_live_bytes_of_code(code: Any, inputs: Sequence[GraphInput]) -> int | None:
    """Return the peak of live bytes of `code`, generated by Inductor, by running the code on tensors without data.
    Inputs that code outside the graph keeps alive are not counted. Return None if the code cannot run without data, or
    is not in the form that Inductor generates for a plain call."""
    call = code.__func__ if isinstance(code, MethodType) else code
    if not isinstance(call, FunctionType) or "AsyncCompile" not in call.__globals__:
        return None
    names = call.__globals__
    dry_run = FunctionType(call.__code__, {**names, **_idle_kernels(names)}, call.__name__)
    arguments = [graph_input.make() for graph_input in inputs]
    live = _LiveBytes(CUDA_BLOCK if any(graph_input.on_gpu for graph_input in inputs) else 1)
    live.count(value for value, graph_input in zip(arguments, inputs, strict=True) if graph_input.owned)
    try:
        with torch.no_grad(), live:
            dry_run(*([code.__self__] if isinstance(code, MethodType) else []), arguments)
    except Exception as error:  # the code calls private functions of Inductor, which vary with device and release
        log_unknown(f"{type(error).__name__}: {error}")
        return None
    return live.most


@cache
def log_unknown(reason: str) -> None:
    """Log that the peak of compiled code is unknown, for `reason`. Each reason is logged once, although the peak is
    requested in every step."""
    log.info("Adacc: cannot run compiled code without data (%s): using the estimate from the graph as its peak", reason)


class _LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts live bytes: of tensors passed to `count`, and of tensors created under the mode."""

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
        """Count the storages of `tensors` as live, and stop counting the storages freed since the last call."""
        self._live = [entry for entry in self._live if not entry[0].expired()]
        counted = {storage for storage, _ in self._live}
        for tensor in tensors:
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in counted:
                counted.add(storage)
                num_blocks = -(-tensor.untyped_storage().nbytes() // self._block_bytes)
                self._live.append((storage, num_blocks * self._block_bytes))
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live))


class _IdleKernel:
    """Replacement for a kernel that Inductor generated. It does nothing when called, directly or through Triton's
    `run`."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    run = __call__


def _idle_kernels(names: Iterable[str]) -> dict[str, Any]:
    """Return replacements, by name, for the kernels and allocation functions that Inductor's generated code calls."""
    idle = {name: _IdleKernel() for name in names if name.startswith(KERNELS) or name in CHECKS}
    return {**idle, **{name: _empty_on_meta for name in names if name.startswith(ALLOCATION)}}


def _empty_on_meta(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a buffer of Inductor's generated code on the meta device, without memory."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
