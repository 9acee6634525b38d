"""Values and operators of a compiled region's joint forward and backward graph, in the profile's format for a block.

A *value* is the result of one forward node. Views are replaced by the value whose storage they share, because
recomputing a view takes no time. Parameters and the batch are not values, because parameters and the batch are
available in backward anyway.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from adacc_hf.artifacts.exact_recompute_rules import decisions, is_index, walk_back
from adacc_hf.artifacts.kind_profile import KindProfile, Operator, Value
from adacc_hf.compiler.functorch import (
    NodeInfo,
    hint,
    is_getitem,
    is_random,
    is_view,
    maker_of,
    makes_sizes,
    must_be_saved,
    must_run_in_forward,
    op_types,
)
from adacc_hf.torch_glue.private import OpOverload, schema_of


@dataclass(frozen=True)
class JointGraph:
    """Values and operators of the forward in a joint graph, each with its fx node."""

    kind: KindProfile
    """Profile of the values and operators, without times. Every value counts as an activation, because a compiled graph
    can store any value for backward."""
    nodes: tuple[fx.Node, ...]
    """Node of each value."""
    operators: tuple[fx.Node, ...]
    """Node of each operator."""

    def value_of(self, node: fx.Node) -> int | None:
        """Return the index of the forward value that shares its storage with `node`. Return None if `node` is not a
        value of this graph, such as a parameter."""
        return self._index.get(root_of(node))

    def source_values(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the indices of the values that share their storages with `nodes`. For a node of backward, return the
        forward values that the node is computed from."""
        index = self._index
        sources, _ = walk_back(map(root_of, nodes), lambda n: None if n in index else map(root_of, n.all_input_nodes))
        return {index[node] for node in sources}

    @cached_property
    def forward(self) -> frozenset[fx.Node]:
        """Nodes that forward runs, without views."""
        return frozenset((*self.nodes, *self.operators))

    @cached_property
    def _index(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.nodes)}


def read_joint_graph(module: fx.GraphModule, info: NodeInfo, held_inputs: Iterable[fx.Node]) -> JointGraph:
    """Return the values and operators of the forward in `module`, a joint graph. `held_inputs` are not listed as
    values, because they stay allocated until backward anyway."""
    static, forward = set(held_inputs), _forward_nodes(module, info)
    nodes = [n for n in forward if _is_value_node(n) and n not in static]
    index = {node: number for number, node in enumerate(nodes)}
    read_in_backward = {
        root_of(read)
        for node in module.graph.nodes
        if node.op != "output" and node not in forward
        for read in node.all_input_nodes
        if read in forward
    }
    operators = [n for n in forward if n.op == "call_function" and not is_view(n) and not is_getitem(n)]
    makers = {node: number for number, node in enumerate(operators)}
    parameter_values = _parameter_values(nodes, set(info.static_lifetime_input_nodes))
    indices = _decisions(module, forward)
    values = tuple(
        _graph_value(number, node, makers, node in read_in_backward, node in parameter_values, node in indices)
        for number, node in enumerate(nodes)
    )
    records = tuple(_graph_operator(number, node, index) for number, node in enumerate(operators))
    kind = KindProfile(
        digest="graph",
        block_class="joint graph",
        values=values,
        operators=records,
        slots=tuple(value.index for value in values if value.saved),
        forward=(),
        backward=(),
        forward_ms=0.0,
    )
    return JointGraph(kind, tuple(nodes), tuple(operators))


def _decisions(module: fx.GraphModule, forward: Container[fx.Node]) -> set[fx.Node]:
    """Return the results of the forward's operators that choose indices from floating-point data."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder" and "float" in _layout(node)[0]]
    calls = (
        (node.all_input_nodes, [node, *filter(is_getitem, node.users)])
        for node in module.graph.nodes
        if node in forward and not is_getitem(node)
    )
    return decisions(calls, inputs, lambda node: is_index(*_layout(node)))


def _layout(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    tensor = node.meta.get("val")
    return (
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if isinstance(tensor, torch.Tensor)
        else ("", ())
    )


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of `node`: the base if `node` is a view, else `node` itself."""
    while is_view(node) or (is_getitem(node) and is_view(maker_of(node))):
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read `node` directly or through a view."""
    for user in node.users:
        yield from readers(user) if is_view(user) else [user]


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of a tensor node. Dynamic sizes have the values of the traced example."""
    tensor = node.meta["val"]
    return hint(tensor.numel()) * tensor.dtype.itemsize


def is_materialized(node: fx.Node) -> bool:
    """Return True if Inductor writes the value to memory, instead of fusing the value's operator with all readers."""
    if not op_types().is_fusible(node):
        return True
    return any(user.op != "output" and not op_types().is_fusible(user) for user in readers(node))


def _forward_nodes(module: fx.GraphModule, info: NodeInfo) -> dict[fx.Node, None]:
    """Return the nodes that forward runs, in order. Results that only backward reads are included if forward must
    compute them, such as random seeds and the row sums of fused attention."""
    makers = {node: maker_of(node) for node in module.graph.nodes if node.op != "output"}
    return dict.fromkeys(
        node for node, maker in makers.items() if info.is_required_fw(maker) or must_run_in_forward(maker)
    )


def _is_value_node(node: fx.Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and node.op in ("call_function", "placeholder") and root_of(node) is node


def _parameter_values(nodes: list[fx.Node], static: set[fx.Node]) -> set[fx.Node]:
    """Return the values computed only from parameters, buffers and constants: casts of weights, position indices."""
    values: set[fx.Node] = set()
    for node in nodes:
        maker = maker_of(node)
        reads = [root_of(read) for read in maker.all_input_nodes]
        is_constant = all(read in static or read in values for read in reads)
        if node.op == "call_function" and is_constant and not is_random(maker):
            values.add(node)
    return values


def _graph_value(
    index: int, node: fx.Node, makers: dict[fx.Node, int], is_saved: bool, is_parameter: bool, is_decision: bool
) -> Value:
    maker = maker_of(node)
    producer = makers.get(maker)
    tensor = node.meta["val"]
    shape = tuple(hint(size) for size in tensor.shape)
    return Value(
        index=index,
        name=node.name,
        shape=shape,
        encoded_shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        nbytes=nbytes_of(node),
        producer=producer,
        saved=is_saved,
        activation=True,
        shared=None,
        recomputable=producer is not None and _is_replayable_node(maker) and not is_decision,
        is_decision=is_decision,
        role="parameter" if is_parameter else "other",
    )


def _graph_operator(index: int, node: fx.Node, values: dict[fx.Node, int]) -> Operator:
    inputs = dict.fromkeys(values[root] for root in map(root_of, node.all_input_nodes) if root in values)
    results = [node, *(user for user in node.users if is_getitem(user))]
    return Operator(
        index=index,
        name=str(node.target),
        module="",
        inputs=tuple(inputs),
        outputs=tuple(values[result] for result in results if result in values),
        ms=0.0,
        replayable=_is_replayable_node(node),
    )


def _is_replayable_node(node: fx.Node) -> bool:
    """Return True if replaying a node gives the same result. The node must be an operator of torch itself, draw no
    random numbers and write nothing in place. An operator with data-dependent sizes is not replayable, because its
    replay would create new size symbols."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if is_random(node) or makes_sizes(node) or schema_of(target).is_mutable:
        return False
    return not any(must_be_saved(result) for result in (node, *node.users) if result is node or is_getitem(result))
