"""Values of a graph that must not be compressed, and values that a coarse codec would degrade too much."""

from typing import Any

import pytest
import torch
from torch import nn

from adacc_hf.compiler.functorch import short_name
from adacc_hf.compiler.graph_precision import exponents, precision_needs, precision_sensitive_nodes
from adacc_hf.compiler.joint_graph import JointGraph


class Masked(nn.Module):
    """Scores with a float mask computed from an integer one, and a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        mask = torch.where(attended.bool(), 0.0, torch.finfo(x.dtype).min)
        hidden = self.linear(self.norm(x))
        weights = (hidden @ hidden.transpose(-1, -2) + mask).softmax(-1)
        # Values selected by a mask are no masks, whatever the mask is computed from.
        weights = torch.where((mask == 0.0).any(), weights, 0.0)
        return weights @ hidden.tanh()


class Classifier(nn.Module):
    """A cross-entropy on a linear layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x.tanh()), labels)


@pytest.fixture
def joint(joint_graph_of: Any) -> JointGraph:
    torch.manual_seed(0)
    return joint_graph_of(Masked(), torch.randn(2, 8, 16, requires_grad=True), torch.ones(2, 1, 8, dtype=torch.int64))


def _targets(joint: JointGraph, values: set[int]) -> set[str]:
    return {str(joint.nodes[value].target).removeprefix("aten.").split(".")[0] for value in values}


def test_masks_and_what_they_are_added_to_are_degraded(joint: JointGraph) -> None:
    degraded = precision_sensitive_nodes(joint)
    assert "where" in _targets(joint, degraded)
    (scores,) = [i for i, n in enumerate(joint.nodes) if "add" in str(n.target) and "where" in str(n.all_input_nodes)]
    assert scores in degraded


def test_scores_are_degraded_before_softmax_and_not_after(joint: JointGraph) -> None:
    degraded = precision_sensitive_nodes(joint)
    by_target = {str(node.target).removeprefix("aten.").split(".")[0]: i for i, node in enumerate(joint.nodes)}
    scores = min(i for i, node in enumerate(joint.nodes) if "bmm" in str(node.target))
    assert {scores, by_target["sub"]} <= degraded
    assert by_target["exp"] not in degraded


def test_logits_and_what_a_loss_takes_the_exponential_of_are_degraded(joint_graph_of: Any) -> None:
    joint = joint_graph_of(Classifier(), torch.randn(64, 16, requires_grad=True), torch.zeros(64, dtype=torch.int64))
    degraded = precision_sensitive_nodes(joint)
    assert {"addmm", "sub"} <= _targets(joint, degraded)
    assert "tanh" in _targets(joint, set(range(len(joint.nodes))) - degraded)


@pytest.mark.parametrize(
    ("function", "divisor"),
    [
        (torch.log, "exp"),
        (torch.sqrt, "sqrt"),
        (lambda x: x.mean() / x, "exp"),
        (lambda x: x**0.5, "exp"),
        (lambda x: (x * x).clamp(max=1e3).log(), "exp"),
    ],
    ids=["log", "sqrt", "div", "root", "made of it"],
)
def test_what_backward_divides_by_is_degraded(joint_graph_of: Any, function: Any, divisor: str) -> None:
    """Divisors in backward are degraded: INT4 rounds small ones to 0, and a gradient becomes infinite."""

    class Divided(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(super().forward(x).exp()) * x.tanh()

    joint = joint_graph_of(Divided(16, 16), torch.randn(64, 16, requires_grad=True))
    degraded = precision_sensitive_nodes(joint)
    assert divisor in _targets(joint, degraded)
    assert "tanh" in _targets(joint, set(range(len(joint.nodes))) - degraded)


def test_activations_and_attention_weights_are_not(joint: JointGraph) -> None:
    allowed = set(range(len(joint.nodes))) - precision_sensitive_nodes(joint)
    assert {"addmm", "tanh", "exp", "div"} <= _targets(joint, allowed)


class Gated(nn.Module):
    """A gate through SiLU, which Inductor decomposes into x / (1 + exp(-x)), or through the exponential itself."""

    def __init__(self, is_bounded: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.is_bounded = is_bounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        gated = nn.functional.silu(gate) * self.up(x)
        return gated if self.is_bounded else gated + torch.exp(-gate)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_an_exponential_is_harmless_where_it_is_only_a_part_of_a_sigmoid(joint_graph_of: Any, is_bounded: bool) -> None:
    joint = joint_graph_of(Gated(is_bounded), torch.randn(2, 8, 16, requires_grad=True))
    power = next(node for node in joint.operators if short_name(node) == "exp")
    gate = joint.value_of(power.args[0].args[0])
    assert short_name(joint.nodes[gate]) == "mm"
    assert (gate in precision_sensitive_nodes(joint)) is not is_bounded
    assert (joint.nodes[gate] in exponents(power.graph)) is not is_bounded


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
    fine, precise = precision_needs(joint)
    # Of the five products the one of queries, keys and values; and fused attention's first output.
    products = [node.name for node in joint.nodes if "mm" in node.name]
    (result, _) = (node.name for node in joint.nodes if "attention" in str(node.args))
    assert len(products) > 3
    assert _names(joint, fine) == _names(joint, precise) == {products[0], result}


def test_parts_are_followed_to_the_whole(joint_graph_of: Any) -> None:
    joint = joint_graph_of(Parted(), torch.randn(2, 8, 16, requires_grad=True))
    assert "addmm" in _names(joint, frozenset.intersection(*precision_needs(joint)))


def test_what_softmax_reads_is_recomputed_of_nothing_coarse(attention_graph: Any) -> None:
    joint = attention_graph(is_fused=False)
    fine, precise = precision_needs(joint)
    (scores, *_) = (node.name for node in joint.nodes if "bmm" in node.name)
    assert not fine
    assert scores in _names(joint, precise)
    assert not [name for name in _names(joint, precise) if name.startswith(("addmm", "exp"))]


def test_what_backward_compares_with_zero_is_stored_finely(joint_graph_of: Any) -> None:
    joint = joint_graph_of(Rectified(), torch.randn(8, 16, requires_grad=True))
    fine, precise = precision_needs(joint)
    assert _names(joint, fine) == {"addmm", "relu"}
    assert not precise
