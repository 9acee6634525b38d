"""Codecs of the values of a compiled graph."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.compiler.functorch import short_name
from adacc_hf.compiler.graph_codecs import graph_codec_options, is_attention_bias
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.torch_glue.tensors import relative_error


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


def test_codecs_are_tried_on_the_cpu_whatever_the_default_device(attention_graph) -> None:
    joint = attention_graph(is_fused=False)
    (value,) = (index for index, node in enumerate(joint.nodes) if short_name(node) == "exp")
    config = AdaccConfig(min_compress_bytes=0, codecs=("fp8",))
    with torch.device("meta"):  # no other test has cached this codec's error
        (option,) = graph_codec_options(joint, value, config, frozenset(), frozenset())
    noise, codec = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)), get_codec("fp8")
    assert option.error == float(relative_error([noise], [codec.decode(codec.encode(noise))])) > 0
