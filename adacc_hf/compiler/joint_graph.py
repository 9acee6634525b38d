"""A joint graph read as one kind of block: its forward values, the operators that make them, and what backward reads.

A *value* is what one forward node makes; views are followed to the value they show, since they cost nothing to
recompute. Inputs that are at hand in backward anyway, parameters and the batch, are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.profile import KindProfile, Operator, Value
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
    """The forward part of a joint graph, by value index."""

    kind: KindProfile
    """Operators without prices; every value is an activation, since a graph can hand over any of them."""
    nodes: tuple[fx.Node, ...]
    """The node of each value."""
    operators: tuple[fx.Node, ...]
    """The node of each operator."""

    def value_of(self, node: fx.Node) -> int | None:
        """The value that `node` is or views; None if it is at hand in backward anyway."""
        return self._index.get(root_of(node))

    def values_behind(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The values that `nodes` are, and for a node that only backward has those that it is made of."""
        return {self._index[node] for node in nodes_behind(nodes, self._index)}

    @cached_property
    def forward(self) -> frozenset[fx.Node]:
        """All that forward runs, views aside."""
        return frozenset((*self.nodes, *self.operators))

    @cached_property
    def _index(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.nodes)}


def read_joint_graph(module: fx.GraphModule, info: NodeInfo, held: Iterable[fx.Node]) -> JointGraph:
    """The values and operators of `module`'s forward; the inputs in `held` are at hand in backward anyway."""
    static, forward = set(held), _forward_nodes(module, info)
    nodes = [n for n in forward if _is_value(n) and n not in static]
    index = {node: number for number, node in enumerate(nodes)}
    wanted = {
        root_of(read)
        for node in module.graph.nodes
        if node.op != "output" and node not in forward
        for read in node.all_input_nodes
        if read in forward
    }
    operators = [n for n in forward if n.op == "call_function" and not is_view(n) and not is_getitem(n)]
    makers = {node: number for number, node in enumerate(operators)}
    own = _made_of_parameters(nodes, set(info.static_lifetime_input_nodes))
    values = tuple(_value(number, node, makers, node in wanted, node in own) for number, node in enumerate(nodes))
    records = tuple(_operator(number, node, index) for number, node in enumerate(operators))
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


def nodes_behind(nodes: Iterable[fx.Node], ends: Container[fx.Node]) -> Iterable[fx.Node]:
    """Of `ends` those that `nodes` are or view, and those that the others are made of."""
    found, _ = walk_back(map(root_of, nodes), lambda n: None if n in ends else map(root_of, n.all_input_nodes))
    return found


def root_of(node: fx.Node) -> fx.Node:
    """The node whose storage `node` shows."""
    while is_view(node) or (is_getitem(node) and is_view(maker_of(node))):
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a node, and of its views."""
    for user in node.users:
        yield from readers(user) if is_view(user) else [user]


def nbytes_of(node: fx.Node) -> int:
    """Bytes of a tensor node; of sizes that are not known until it runs, those of the traced example."""
    tensor = node.meta["val"]
    return hint(tensor.numel()) * tensor.dtype.itemsize


def is_held(node: fx.Node) -> bool:
    """Whether a value lies in memory when it is recomputed: where all that reads it is fused with it, it never does."""
    if not op_types().is_fusible(node):
        return True
    return any(user.op != "output" and not op_types().is_fusible(user) for user in readers(node))


def _forward_nodes(module: fx.GraphModule, info: NodeInfo) -> dict[fx.Node, None]:
    """What forward runs, in order, and what it must make for backward alone: fused attention's sums and seeds."""
    made = {node: maker_of(node) for node in module.graph.nodes if node.op != "output"}
    return dict.fromkeys(
        node for node, maker in made.items() if info.is_required_fw(maker) or must_run_in_forward(maker)
    )


def _is_value(node: fx.Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and node.op in ("call_function", "placeholder") and root_of(node) is node


def _made_of_parameters(nodes: list[fx.Node], static: set[fx.Node]) -> set[fx.Node]:
    """Values that nothing but parameters, buffers and constants goes into: casts of weights, ranges of positions.

    What is drawn at random has no inputs either, and is none of them.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        maker = maker_of(node)
        reads = [root_of(read) for read in maker.all_input_nodes]
        known = all(read in static or read in found for read in reads)
        if node.op == "call_function" and known and not is_random(maker):
            found.add(node)
    return found


def _value(index: int, node: fx.Node, makers: dict[fx.Node, int], wanted: bool, of_parameters: bool) -> Value:
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
        saved=wanted,
        activation=True,
        shared=None,
        recomputable=producer is not None and _is_replayable(maker),
        role="parameter" if of_parameters else "other",
    )


def _operator(index: int, node: fx.Node, values: dict[fx.Node, int]) -> Operator:
    inputs = dict.fromkeys(values[root] for root in map(root_of, node.all_input_nodes) if root in values)
    made = [node, *(user for user in node.users if is_getitem(user))]
    return Operator(
        index=index,
        name=str(node.target),
        module="",
        inputs=tuple(inputs),
        outputs=tuple(values[made_node] for made_node in made if made_node in values),
        ms=0.0,
        replayable=_is_replayable(node),
    )


def _is_replayable(node: fx.Node) -> bool:
    """Whether running a node again gives the same: it draws nothing, changes nothing and comes from torch itself.

    What makes sizes would make other ones.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if is_random(node) or makes_sizes(node) or schema_of(target).is_mutable:
        return False
    return not any(must_be_saved(made) for made in (node, *node.users) if made is node or is_getitem(made))
