"""Graph passes on the partitioned forward and backward graphs of a compiled region.

One pass replaces saved values by codec payloads. The codecs are traced into plain operators, so Inductor fuses encoding
with the operator that computes the value, and decoding with the value's readers. Elements are encoded in memory order,
and a decoded value has the strides of the original. Another pass keeps Inductor from fusing matrix products in backward
with additions.
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
    """Replace each saved tensor named in `codecs` by its payload, encoded with the given codec. The outputs of the
    forward graph are `num_outputs` results, and then the saved tensors."""
    output = next(iter(forward.graph.find_nodes(op="output")))
    handed_over: list[fx.Node] = []
    notes = {name: list(output.meta[name]) for name in ("desc", "output_stack_traces") if name in output.meta}
    sources = list(range(num_outputs))
    for position, node in enumerate(output.args[0][num_outputs:], start=num_outputs):
        nodes = (
            _insert_encoding(forward.graph, output, node, codecs[node.name])
            if isinstance(node, fx.Node) and node.name in codecs
            else [node]
        )
        handed_over += nodes
        sources += [position] * len(nodes)
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        if placeholder.name in codecs:
            _insert_decoding(backward.graph, placeholder, codecs[placeholder.name])
    output.args = ((*output.args[0][:num_outputs], *handed_over),)
    for name, entries in notes.items():
        output.meta[name] = [entries[source] for source in sources]
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the outermost to the innermost in memory. Codecs encode in this order."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-hint(strides[d]), d))


def _in_memory_order(tensor: Tensor) -> Tensor:
    order = memory_order(tensor)
    return tensor if order == sorted(order) else tensor.permute(order)


def _insert_encoding(graph: fx.Graph, before: fx.Node, node: fx.Node, codec: Codec) -> list[fx.Node]:
    example = node.meta["val"]
    traced = _traced_graph(
        lambda tensor: codec.encode_traceable(_in_memory_order(tensor)), [example], example.fake_mode
    )
    with graph.inserting_before(before):
        payload = _inline_graph(graph, traced, [node])
    for number, tensor in enumerate(payload):
        tensor.name = payload_name(node.name, number)
    return payload


def _insert_decoding(graph: fx.Graph, placeholder: fx.Node, codec: Codec) -> None:
    """Replace a saved tensor's `placeholder` in the backward graph by placeholders of its encoded payload. The
    operators that decode the payload are inserted before the first reader."""
    example = placeholder.meta["val"]
    order = memory_order(example)
    inverse_order = [order.index(d) for d in range(len(order))]
    size = [example.shape[d] for d in order]
    dynamic = [d for d, length in enumerate(size) if isinstance(length, torch.SymInt)]
    with example.fake_mode:
        payload = codec.encode_traceable(_in_memory_order(example))

    def decode(*inputs: Any) -> tuple[Tensor]:
        tensors, lengths = inputs[: len(payload)], iter(inputs[len(payload) :])
        full_size = tuple(next(lengths) if d in dynamic else length for d, length in enumerate(size))
        return (codec.decode_traceable(tensors, full_size, example.dtype).permute(inverse_order),)

    traced = _traced_graph(decode, [*payload, *(size[d] for d in dynamic)], example.fake_mode)
    inputs = []
    with graph.inserting_before(placeholder):
        for number, tensor in enumerate(payload):
            inputs.append(graph.placeholder(payload_name(placeholder.name, number)))
            inputs[-1].meta = {**placeholder.meta, "val": tensor}
            inputs[-1].meta.pop("tensor_meta", None)
    # Decode as late as possible, because the decoded tensor takes memory until it is read.
    with graph.inserting_before(min(placeholder.users)):
        lengths = [size_node(graph, size[d]) for d in dynamic]
        (decoded,) = _inline_graph(graph, traced, [*inputs, *lengths])
    placeholder.replace_all_uses_with(decoded)
    graph.erase_node(placeholder)


def payload_name(value: str, number: int) -> str:
    """Return the name of a tensor of the encoded payload of `value`, for the forward and the backward graph. A payload
    consists of several tensors. `number` is the index of the tensor in the payload."""
    return f"{value}_coded_{number}"


def _traced_graph(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Any], mode: FakeTensorMode
) -> fx.GraphModule:
    with mode:
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*examples)


def _inline_graph(graph: fx.Graph, traced: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    copies: dict[fx.Node, Any] = {}
    remaining_inputs = iter(inputs)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(remaining_inputs)
        elif node.op == "output":
            return [copies[result] for result in tree_leaves(node.args[0])]
        else:
            copies[node] = graph.node_copy(node, lambda read: copies[read])
    raise AssertionError("a traced graph ends with its output")


# Gradients that are sums: a product in such a sum must run early in the backward graph, to free the product's operands.

aten = torch.ops.aten


def prevent_addmm_fusion(backward: fx.GraphModule) -> None:
    """Rewrite sums of gradients in the backward graph, so that Inductor fuses no matrix product with an addition.

    Inductor fuses a product and an added term into one `addmm`, which can run only once the term is computed. If the
    head shares its weight with the embedding, the term is computed at the end of backward. Until then the logits'
    gradient and the head's input would stay in memory. Inductor does not fuse a - (-b), which equals a + b bit for bit.
    """
    graph = backward.graph
    gradients = {node for node in graph.find_nodes(op="output")[0].args[0] if isinstance(node, fx.Node)}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = [argument for argument in node.args if isinstance(argument, fx.Node)]
        are_all_nodes = not node.kwargs and len(terms) == len(node.args)
        if node in gradients and are_all_nodes and any(map(_is_matrix_product, terms)):
            _subtract_instead(graph, node, terms)
    graph.lint()
    backward.recompile()


def _is_matrix_product(term: fx.Node) -> bool:
    return root_of(term).target is aten.mm.default


def _subtract_instead(graph: fx.Graph, node: fx.Node, terms: list[fx.Node]) -> None:
    product, other = terms if _is_matrix_product(terms[0]) else terms[::-1]
    with graph.inserting_before(node):
        negative = graph.call_function(aten.neg.default, (product,))
        negative.meta = {**product.meta}
        difference = graph.call_function(aten.sub.Tensor, (other, negative))
        difference.meta = {**node.meta}
    node.replace_all_uses_with(difference)
    graph.erase_node(node)
