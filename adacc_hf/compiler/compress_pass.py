"""A partitioned pair of graphs rewritten: payloads and decoding in the place of values, products run early.

The codecs are traced into plain operators, so Inductor fuses encoding with what makes a value and decoding with what
reads it. Elements are taken in the order of memory, and a decoded value has the strides of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.functorch import hint, select_decomp_table, size_node
from adacc_hf.compiler.joint_graph import root_of
from adacc_hf.kernels.codecs import Codec
from adacc_hf.torch_glue.private import FakeTensorMode, tree_leaves


def compress_saved(
    forward: fx.GraphModule, backward: fx.GraphModule, codecs: Mapping[str, Codec], num_outputs: int
) -> None:
    """Hand over payloads in place of the tensors named in `codecs`, which forward saves after `num_outputs` results."""
    output = next(iter(forward.graph.find_nodes(op="output")))
    handed_over: list[fx.Node] = []
    notes = {name: list(output.meta[name]) for name in ("desc", "output_stack_traces") if name in output.meta}
    sources = list(range(num_outputs))
    for position, node in enumerate(output.args[0][num_outputs:], start=num_outputs):
        kept = _encode(forward.graph, output, node, codecs[node.name]) if _is_coded(node, codecs) else [node]
        handed_over += kept
        sources += [position] * len(kept)
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        if placeholder.name in codecs:
            _decode(backward.graph, placeholder, codecs[placeholder.name])
    output.args = ((*output.args[0][:num_outputs], *handed_over),)
    for name, entries in notes.items():
        output.meta[name] = [entries[source] for source in sources]
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-hint(strides[d]), d))


def _in_memory_order(tensor: Tensor) -> Tensor:
    """`tensor`, or a view of it whose dimensions are in the order of memory."""
    order = memory_order(tensor)
    return tensor if order == sorted(order) else tensor.permute(order)


def _is_coded(node: Any, codecs: Mapping[str, Codec]) -> bool:
    return isinstance(node, fx.Node) and node.name in codecs


def _encode(graph: fx.Graph, before: fx.Node, node: fx.Node, codec: Codec) -> list[fx.Node]:
    """Put the encoding of `node` before `before`; returns the nodes of the payload."""
    example = node.meta["val"]
    traced = _traced(lambda tensor: codec.encode_traceable(_in_memory_order(tensor)), [example], example.fake_mode)
    with graph.inserting_before(before):
        kept = _inline(graph, traced, [node])
    for number, payload in enumerate(kept):
        payload.name = payload_name(node.name, number)
    return kept


def _decode(graph: fx.Graph, placeholder: fx.Node, codec: Codec) -> None:
    """Replace `placeholder` by placeholders of its payload, and what read it by their decoding."""
    example = placeholder.meta["val"]
    order = memory_order(example)
    back = [order.index(d) for d in range(len(order))]
    size = [example.shape[d] for d in order]
    dynamic = [d for d, length in enumerate(size) if isinstance(length, torch.SymInt)]
    with example.fake_mode:
        payload = codec.encode_traceable(_in_memory_order(example))

    def decode(*given: Any) -> tuple[Tensor]:
        tensors, lengths = given[: len(payload)], iter(given[len(payload) :])
        whole = tuple(next(lengths) if d in dynamic else length for d, length in enumerate(size))
        return (codec.decode_traceable(tensors, whole, example.dtype).permute(back),)

    traced = _traced(decode, [*payload, *(size[d] for d in dynamic)], example.fake_mode)
    inputs = []
    with graph.inserting_before(placeholder):
        for number, tensor in enumerate(payload):
            inputs.append(graph.placeholder(payload_name(placeholder.name, number)))
            inputs[-1].meta = {**placeholder.meta, "val": tensor}
            inputs[-1].meta.pop("tensor_meta", None)
    # As late as can be: what is decoded long before it is read would take up memory.
    with graph.inserting_before(min(placeholder.users)):
        lengths = [size_node(graph, size[d]) for d in dynamic]
        (decoded,) = _inline(graph, traced, [*inputs, *lengths])
    placeholder.replace_all_uses_with(decoded)
    graph.erase_node(placeholder)


def payload_name(value: str, number: int) -> str:
    """The name of one tensor of a value's payload, the same in both graphs."""
    return f"{value}_coded_{number}"


def _traced(function: Callable[..., Sequence[Tensor]], examples: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """`function` as a graph of the operators that Inductor lowers."""
    with mode:
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*examples)


def _inline(graph: fx.Graph, traced: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Copy the operators of `traced` to the insertion point of `graph`; returns the nodes of its results."""
    found: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "output":
            return [found[result] for result in tree_leaves(node.args[0])]
        else:
            found[node] = graph.node_copy(node, lambda read: found[read])
    raise AssertionError("a traced graph ends with its output")


# Gradients that are sums: the products among them run early in a backward graph, and let their operands go.

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
        terms = [argument for argument in node.args if isinstance(argument, fx.Node)]
        are_all = not node.kwargs and len(terms) == len(node.args)
        if node in gradients and are_all and any(map(_is_product, terms)):
            _subtract_instead(graph, node, terms)
    graph.lint()
    backward.recompile()


def _is_product(term: fx.Node) -> bool:
    return root_of(term).target is aten.mm.default


def _subtract_instead(graph: fx.Graph, node: fx.Node, terms: list[fx.Node]) -> None:
    product, other = terms if _is_product(terms[0]) else terms[::-1]
    with graph.inserting_before(node):
        negative = graph.call_function(aten.neg.default, (product,))
        negative.meta = {**product.meta}
        difference = graph.call_function(aten.sub.Tensor, (other, negative))
        difference.meta = {**node.meta}
    node.replace_all_uses_with(difference)
    graph.erase_node(node)
