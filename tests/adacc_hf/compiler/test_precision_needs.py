"""Values of a graph that a coarse codec would degrade too much."""

from typing import Any

import torch
from torch import nn

from adacc_hf.compiler.graph_precision import precision_needs
from adacc_hf.compiler.joint_graph import JointGraph


class Rectified(nn.Module):
    """A product, ReLU and another product, after a hyperbolic tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.tanh()).relu())


class Parted(nn.Module):
    """Queries, keys and values as parts of one product, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).split(16, dim=-1)
        return nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])


def _names(joint: JointGraph, values: frozenset[int]) -> set[str]:
    return {joint.nodes[value].name for value in values}


def test_what_fused_attention_multiplies_and_gives_is_sensitive(attention_graph: Any) -> None:
    joint = attention_graph(is_fused=True)
    sensitive = precision_needs(joint)
    # Of the five products the one of queries, keys and values; and fused attention's first output.
    products = [node.name for node in joint.nodes if "mm" in node.name]
    (result, _) = (node.name for node in joint.nodes if "attention" in str(node.args))
    assert len(products) > 3
    assert _names(joint, sensitive.fine) == _names(joint, sensitive.precise) == {products[0], result}


def test_parts_are_followed_to_the_whole(joint_graph_of: Any) -> None:
    joint = joint_graph_of(Parted(), torch.randn(2, 8, 16, requires_grad=True))
    assert "addmm" in _names(joint, precision_needs(joint).fine & precision_needs(joint).precise)


def test_what_softmax_reads_is_recomputed_of_nothing_coarse(attention_graph: Any) -> None:
    joint = attention_graph(is_fused=False)
    sensitive = precision_needs(joint)
    (scores, *_) = (node.name for node in joint.nodes if "bmm" in node.name)
    assert not sensitive.fine
    assert scores in _names(joint, sensitive.precise)
    assert not [name for name in _names(joint, sensitive.precise) if name.startswith(("addmm", "exp"))]


def test_what_backward_compares_with_zero_is_stored_finely(joint_graph_of: Any) -> None:
    joint = joint_graph_of(Rectified(), torch.randn(8, 16, requires_grad=True))
    sensitive = precision_needs(joint)
    assert _names(joint, sensitive.fine) == {"addmm", "relu"}
    assert not sensitive.precise
