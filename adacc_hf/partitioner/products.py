"""Gradients that are sums: the products among them run early in a backward graph, and let their operands go."""

from __future__ import annotations

import torch
from torch import fx

from adacc_hf.partitioner.joint_graph import root_of

aten = torch.ops.aten


def keep_products_apart(backward: fx.GraphModule) -> None:
    """Let no product that is a part of a gradient wait for the other part of it.

    Inductor makes one `addmm` of a product and what is added to it, once that is known. For a weight that the head
    shares with the embedding, that is when all of backward is through, and until then the gradient of the logits and
    what the head read would be held. A sum a + b has the bits of a - (-b), which Inductor leaves as it is.
    """
    graph = backward.graph
    gradients = {node for node in graph.find_nodes(op="output")[0].args[0] if isinstance(node, fx.Node)}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        are_tensors = not node.kwargs and all(isinstance(argument, fx.Node) for argument in node.args)
        if node in gradients and are_tensors and any(map(_is_product, node.args)):
            _subtract_instead(graph, node)
    graph.lint()
    backward.recompile()


def _is_product(argument: fx.Node) -> bool:
    return root_of(argument).target is aten.mm.default


def _subtract_instead(graph: fx.Graph, node: fx.Node) -> None:
    product, other = node.args if _is_product(node.args[0]) else reversed(node.args)
    with graph.inserting_before(node):
        negative = graph.call_function(aten.neg.default, (product,))
        negative.meta = {**product.meta}
        difference = graph.call_function(aten.sub.Tensor, (other, negative))
        difference.meta = {**node.meta}
    node.replace_all_uses_with(difference)
    graph.erase_node(node)
