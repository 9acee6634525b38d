"""Values of a compiled graph that need more precision, found from the graph's operators before any data is seen.

Some values must be stored losslessly (`precision_sensitive_nodes`). Other values may be compressed lossily, but only by
the precise codec (INT8). Further values must not be recomputed from a value that a coarser codec, such as INT4, stores
(`precision_needs`).

A codec scales each group of elements by its largest element. A mask's infinities, or large numbers in place of
infinities, leave no precision for the other elements of their group. Values to which a mask was added are just as
large. Sums and norms have few elements, each of which affects a whole row. An additive error in the input of an
exponential (logits, log-probabilities, scores) becomes a factor in its result. A small divisor that decodes to 0 gives
infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import fx

from adacc_hf.compiler.functorch import hint, is_getitem, is_view, maker_of, op_types, short_name
from adacc_hf.compiler.joint_graph import JointGraph
from adacc_hf.price.precision_sensitive import EXPONENTS, ZERO_TO_ZERO, attention_arguments, divisors, is_summary

HUGE = 1e4
"""Magnitude above which a number is assumed to come from a mask, not from an activation. Masks contain -10000, the
least number of the mask's dtype, or -inf."""

BOUNDED = {"exp", "sigmoid", "tanh", "erf", "softmax", "reciprocal", "cos", "sin"}
"""Operators whose results have ordinary magnitude even if the input contains a mask's large numbers."""
GROWING = {"exp", "exp2", "expm1", "softmax", *EXPONENTS}
"""Operators that turn a relative error of their input into a larger relative error."""
INVERTING = {"log", "log2", "log10", "reciprocal", "rsqrt"}
"""Operators that map 0 to an infinity. Divisions in backward are part of the graph too."""


def precision_sensitive_nodes(joint: JointGraph) -> frozenset[int]:
    """Return the indices of the values that must not be compressed lossily. These are masks, values computed from
    masks, statistics, exponents and divisors."""
    graph = joint.nodes[0].graph if joint.nodes else fx.Graph()
    huge: set[fx.Node] = set()
    ordinary: set[fx.Node] = set()
    precise = exponents(graph) | _divisor_nodes(graph)
    for node in graph.nodes:
        if _is_huge_node(node, huge):
            huge.add(node)
        if _is_float_node(node) and (
            node.op == "placeholder" or any(read in ordinary for read in node.all_input_nodes)
        ):
            ordinary.add(node)
    return frozenset(
        index
        for index, node in enumerate(joint.nodes)
        if node in huge or node in precise or node not in ordinary or _is_statistic_node(node)
    )


def exponents(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs of operators that amplify errors, such as exp, and the elementwise sources of these inputs."""
    growing = {node for node in graph.nodes if short_name(node) in GROWING and not _is_logistic(node)}
    return elementwise_sources(graph, {node for node in graph.nodes if not growing.isdisjoint(node.users)})


def elementwise_sources(graph: fx.Graph, nodes: Set[fx.Node]) -> set[fx.Node]:
    """Return `nodes`, and all earlier nodes from which any of `nodes` is computed by elementwise operators only. The
    search stops at matrix products and sums, which average errors out, and at bounded functions, which keep errors
    small."""
    sources = set(nodes)
    for node in reversed(graph.nodes):
        for user in node.users:
            if user in sources and short_name(user) not in BOUNDED and _is_elementwise(node, user):
                sources.add(node)
    return sources


def _is_logistic(node: fx.Node) -> bool:
    """Return True if the node is the exponential in a bounded 1 / (1 + exp(x)): a decomposed sigmoid or SiLU."""
    sums = list(node.users)
    are_sums = all(short_name(user) == "add" and user.args[1] == 1 for user in sums)
    return short_name(node) == "exp" and are_sums and all(_is_inverted_by(user, s) for s in sums for user in s.users)


def _divisor_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are used as divisors, and the nodes whose zeros would make a divisor 0."""
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


def _is_elementwise(source: fx.Node, user: fx.Node) -> bool:
    """Return True if each element of `user` depends on a single element of `source`."""
    if is_view(user) or is_getitem(user):
        return True
    tensor, result = source.meta.get("val"), user.meta.get("val")
    if not (op_types().is_fusible(user) and isinstance(tensor, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    return hint(tensor.numel()) <= hint(result.numel())


def _is_huge_node(node: fx.Node, huge: set[fx.Node]) -> bool:
    """Return True if the node may contain a mask's large numbers, from a constant or from an input node in `huge`."""
    if short_name(node) in BOUNDED or _is_boolean_node(node):
        return False
    numbers = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, float)]
    if _is_float_node(node) and any(not abs(number) < HUGE for number in numbers):  # True for nan as well
        return True
    return any(read in huge for read in node.all_input_nodes)


def _is_boolean_node(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool


def _is_float_node(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    if isinstance(tensor, (tuple, list)):  # the parts of a tuple are separate getitem nodes
        return any(isinstance(part, torch.Tensor) and part.is_floating_point() for part in tensor)
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _is_statistic_node(node: fx.Node) -> bool:
    inputs = maker_of(node).all_input_nodes
    reads = [read.meta["val"] for read in inputs if isinstance(read.meta.get("val"), torch.Tensor)]
    sizes = [[hint(length) for length in tensor.shape] for tensor in (node.meta["val"], *reads[:1])]
    return not sizes[0] or is_summary(sizes[0], sizes[1] if reads else ())


# Values of a graph for which a coarse codec is too inaccurate. There is no data yet to try codecs on.
#
# Fused attention's backward recomputes the softmax from stored queries and keys, so codec errors pass through an
# exponential; a softmax that is recomputed does the same. If scores are large, four bits are far too few. If a value is
# compared with zero, as ReLU's result in its backward, four bits turn many elements into zero.

FACTORS = ("query", "key", "value", "q", "k", "v", "out")
"""Names of the arguments of fused attention (queries, keys, values) and, in backward, of its result. If a softmax is
sharp, its gradient is a small difference of numbers that are computed from these tensors."""
COMPARISONS = {"lt", "le", "gt", "ge"}


def precision_needs(joint: JointGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Return two sets of indices of values for which coarse codecs such as INT4 are too inaccurate: (values that may be
    compressed lossily only by the precise codec (INT8), values that must not be recomputed from a value stored by a
    coarser codec). They are the inputs and the result of fused attention, the inputs of exponentials and other
    operators that amplify errors, and the values that are compared with a constant such as zero."""
    graph = joint.nodes[0].graph if joint.nodes else fx.Graph()
    factors = _sources_read_by(_is_factor_of, graph)
    # Products average errors out: hardly any element of a product of coarse values becomes zero by an error. So values
    # that are compared may be recomputed from coarse values.
    fine, precise = factors | _sources_read_by(_is_compared_by, graph), factors | exponents(graph)
    nodes = list(enumerate(joint.nodes))
    return frozenset(i for i, node in nodes if node in fine), frozenset(i for i, node in nodes if node in precise)


def _sources_read_by(is_reader: Callable[[fx.Node, fx.Node], bool], graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes with a user for which `is_reader(user, node)` is True, and the nodes from which these nodes are
    computed elementwise."""
    nodes = {node for node in graph.nodes if node.op != "output" and any(is_reader(user, node) for user in node.users)}
    return elementwise_sources(graph, nodes)


def _is_factor_of(user: fx.Node, node: fx.Node) -> bool:
    arguments = attention_arguments(user.target, user.args, user.kwargs)
    return any(arguments.get(name) is node for name in FACTORS)


def _is_compared_by(user: fx.Node, node: fx.Node) -> bool:
    """Return True if `user` compares the elements of `node` with a constant number."""
    tensor = node.meta.get("val")
    is_number = len(user.args) == 2 and user.args[0] is node and isinstance(user.args[1], (int, float))
    is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return is_float and is_number and short_name(user) in COMPARISONS
