"""Which values of a graph a coarse codec would put too far off: there is no data to try codecs on yet.

Backward of fused attention makes its softmax again, and takes the exponential of what a codec left of queries and keys;
so does a softmax that is remade. Where scores are large, four bits leave nothing of it. And of what is compared with
zero, as ReLU's result is in its backward, four bits make many an element zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from adacc_hf.partitioner.functorch import short_name
from adacc_hf.partitioner.joint_graph import JointGraph
from adacc_hf.partitioner.spoiled import elementwise_sources, exponents
from adacc_hf.profiling.spoiled import attention_arguments

FACTORS = ("query", "key", "value", "q", "k", "v", "out")
"""What fused attention calls its products' factors, and in backward its result. A sharp softmax's gradient is a small
difference of what these give."""
COMPARISONS = {"lt", "le", "gt", "ge"}


@dataclass(frozen=True)
class Sensitive:
    """Values by index."""

    fine: frozenset[int]
    """What is stored with loss is stored by a fine codec."""
    precise: frozenset[int]
    """And what is remade is remade of nothing coarser."""


def sensitive_values(joint: JointGraph) -> Sensitive:
    graph = joint.nodes[0].graph if joint.nodes else fx.Graph()
    factors = _sources_of_what_is(_is_factor_of, graph)
    # A product of what is coarse averages errors out: next to none of its elements is zero for them.
    compared = _sources_of_what_is(_is_compared_by, graph)
    return Sensitive(fine=_indices(joint, factors | compared), precise=_indices(joint, factors | exponents(graph)))


def _sources_of_what_is(read_by: Callable[[fx.Node, fx.Node], bool], graph: fx.Graph) -> set[fx.Node]:
    """What some user reads like that, and what it is made of element by element."""
    found = {node for node in graph.nodes if node.op != "output" and any(read_by(user, node) for user in node.users)}
    return elementwise_sources(graph, found)


def _indices(joint: JointGraph, nodes: set[fx.Node]) -> frozenset[int]:
    return frozenset(index for index, node in enumerate(joint.nodes) if node in nodes)


def _is_factor_of(user: fx.Node, node: fx.Node) -> bool:
    given = attention_arguments(user.target, user.args, user.kwargs)
    return any(given.get(name) is node for name in FACTORS)


def _is_compared_by(user: fx.Node, node: fx.Node) -> bool:
    """Whether its numbers are told from a fixed one."""
    tensor = node.meta.get("val")
    is_number = len(user.args) == 2 and user.args[0] is node and isinstance(user.args[1], (int, float))
    is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return is_float and is_number and short_name(user) in COMPARISONS
