"""Which values of a graph a lossy or a coarse codec would degrade, as far as the graph shows: there is no data yet.

A mask's infinities, or the large numbers that stand for them, take up the whole scale of the group they are in, and
what is added to them keeps them. Sums and norms have few elements, each of which decides about a whole row. What an
exponential reads is off by a factor where it is off by a term: logits, logarithms of probabilities, scores. And a small
element that comes back as 0 makes infinite what is divided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import fx

from adacc_hf.compiler.functorch import hint, is_getitem, is_view, maker_of, op_types, short_name
from adacc_hf.compiler.joint_graph import JointGraph
from adacc_hf.price.codec_selection import EXPONENTS, ZERO_TO_ZERO, attention_arguments, divisors, is_summary

HUGE = 1e4
"""Numbers from here on are no activations: masks hold -10000, the least number of their dtype, or -inf."""

BOUNDED = {"exp", "sigmoid", "tanh", "erf", "softmax", "reciprocal", "cos", "sin"}
"""Their results are of ordinary size whatever they read."""
GROWING = {"exp", "exp2", "expm1", "softmax", *EXPONENTS}
"""Of these the error of what they read is no longer a relative one."""
INVERTING = {"log", "log2", "log10", "reciprocal", "rsqrt"}
"""Of 0 they make an infinity. A graph has backward in it: what that divides by stands there (unlike on a tape)."""


def precision_sensitive_nodes(joint: JointGraph) -> frozenset[int]:
    """Values that must be kept or recomputed, never compressed with loss: masks, what holds one, statistics, exponents,
    divisors."""
    graph = joint.nodes[0].graph if joint.nodes else fx.Graph()
    huge: set[fx.Node] = set()
    ordinary: set[fx.Node] = set()
    precise = exponents(graph) | _divisors(graph)
    for node in graph.nodes:
        if _is_huge(node, huge):
            huge.add(node)
        if _is_float(node) and (node.op == "placeholder" or any(read in ordinary for read in node.all_input_nodes)):
            ordinary.add(node)
    return frozenset(
        index
        for index, node in enumerate(joint.nodes)
        if node in huge or node in precise or node not in ordinary or _is_statistic(node)
    )


def exponents(graph: fx.Graph) -> set[fx.Node]:
    """What is read, element by element, by something that makes errors grow."""
    read = {node for node in graph.nodes if any(map(_grows, node.users))}
    return elementwise_sources(graph, read)


def elementwise_sources(graph: fx.Graph, nodes: Set[fx.Node]) -> set[fx.Node]:
    """Those nodes and all that they are made of element by element; across a product or a sum errors average out, and a
    bounded function keeps them small."""
    found = set(nodes)
    for node in reversed(graph.nodes):
        for user in node.users:
            if user in found and short_name(user) not in BOUNDED and _is_elementwise(node, user):
                found.add(node)
    return found


def _grows(user: fx.Node) -> bool:
    return short_name(user) in GROWING and not _is_logistic(user)


def _is_logistic(node: fx.Node) -> bool:
    """Whether an exponential is a part of 1 / (1 + exp(x)), which is bounded: sigmoid and SiLU, taken apart."""
    sums = list(node.users)
    are_sums = all(short_name(user) == "add" and user.args[1] == 1 for user in sums)
    return short_name(node) == "exp" and are_sums and all(_is_inverted_by(user, s) for s in sums for user in s.users)


def _divisors(graph: fx.Graph) -> set[fx.Node]:
    """What something is divided by, and what that is made of element by element."""
    return divisors(
        (
            [read for read in node.all_input_nodes if _is_inverted_by(node, read)],
            [node],
            node.all_input_nodes if short_name(node) in ZERO_TO_ZERO or is_view(node) else (),
        )
        for node in reversed(graph.nodes)
    )


def _is_inverted_by(user: fx.Node, node: fx.Node) -> bool:
    name = short_name(user)
    if name == "pow" and user.args[0] is node:
        return not (isinstance(user.args[1], (int, float)) and user.args[1] >= 0)
    return name in INVERTING or (name == "div" and user.args[1] is node)


def _is_elementwise(read: fx.Node, user: fx.Node) -> bool:
    """Whether a user is a view of what it reads, or a part, or makes an element or more of each element."""
    if is_view(user) or is_getitem(user):
        return True
    source, made = read.meta.get("val"), user.meta.get("val")
    if not (op_types().is_fusible(user) and isinstance(source, torch.Tensor) and isinstance(made, torch.Tensor)):
        return False
    return hint(source.numel()) <= hint(made.numel())


def _is_huge(node: fx.Node, huge: set[fx.Node]) -> bool:
    """Whether a value may hold a mask's numbers: it is made with one, or of what holds one."""
    if short_name(node) in BOUNDED or _is_truth(node):
        return False
    numbers = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, float)]
    if _is_float(node) and any(not abs(number) < HUGE for number in numbers):  # so that nan is huge
        return True
    return any(read in huge for read in node.all_input_nodes)


def _is_truth(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool


def _is_float(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    if isinstance(tensor, (tuple, list)):  # its parts are taken out by name
        return any(isinstance(part, torch.Tensor) and part.is_floating_point() for part in tensor)
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _is_statistic(node: fx.Node) -> bool:
    inputs = maker_of(node).all_input_nodes
    reads = [read.meta["val"] for read in inputs if isinstance(read.meta.get("val"), torch.Tensor)]
    sizes = [[hint(length) for length in tensor.shape] for tensor in (node.meta["val"], *reads[:1])]
    return not sizes[0] or is_summary(sizes[0], sizes[1] if reads else ())


# Which values of a graph a coarse codec would put too far off: there is no data to try codecs on yet.
#
# Backward of fused attention makes its softmax again, and takes the exponential of what a codec left of queries and
# keys; so does a softmax that is recomputed. Where scores are large, four bits leave nothing of it. And of what is
# compared with zero, as ReLU's result is in its backward, four bits make many an element zero.

FACTORS = ("query", "key", "value", "q", "k", "v", "out")
"""What fused attention calls its products' factors, and in backward its result. A sharp softmax's gradient is a small
difference of what these give."""
COMPARISONS = {"lt", "le", "gt", "ge"}


@dataclass(frozen=True)
class PrecisionNeeds:
    """Values by index."""

    fine: frozenset[int]
    """What is stored with loss is stored by a fine codec."""
    precise: frozenset[int]
    """And what is recomputed is recomputed of nothing coarser."""


def precision_needs(joint: JointGraph) -> PrecisionNeeds:
    graph = joint.nodes[0].graph if joint.nodes else fx.Graph()
    factors = _sources_of_what_is(_is_factor_of, graph)
    # A product of what is coarse averages errors out: next to none of its elements is zero for them.
    compared = _sources_of_what_is(_is_compared_by, graph)
    return PrecisionNeeds(fine=_indices(joint, factors | compared), precise=_indices(joint, factors | exponents(graph)))


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
