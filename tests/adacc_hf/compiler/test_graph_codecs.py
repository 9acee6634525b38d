"""Codecs of the values of a compiled graph."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from adacc_hf.compiler import graph_codecs
from adacc_hf.compiler.graph_codecs import is_attention_bias


def test_what_attention_adds_to_its_scores_is_known_through_views() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None].expand(2, 3, -1, -1))

    parts = [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]
    graph = make_fx(attention)(*parts, torch.ones(8, 8, dtype=torch.bool).tril()).graph
    biases = [node for node in graph.nodes if is_attention_bias(node)]
    assert [node.target for node in biases if "view" not in str(node.target) and "expand" not in str(node.target)] == [
        torch.ops.aten.where.self
    ]
    assert not any(is_attention_bias(node) for node in graph.find_nodes(op="placeholder")[:3])


def test_codecs_are_tried_on_the_cpu_whatever_the_default_device() -> None:
    """Codecs are tried on the CPU whatever the default device is.

    Graphs may be cut inside a script that called torch.set_default_device("cuda").
    """
    expected = graph_codecs._typical_error("int8", 64)
    graph_codecs._typical_error.cache_clear()
    with torch.device("meta"):
        assert graph_codecs._typical_error("int8", 64) == expected
