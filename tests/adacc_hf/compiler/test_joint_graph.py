"""A joint graph read as one kind of block: its values, its operators, and what backward reads."""

import pytest
import torch
from torch import Tensor, nn

from adacc_hf.compiler.functorch import is_getitem, is_view, short_name
from adacc_hf.compiler.joint_graph import is_materialized


class Small(nn.Module):
    """A product, a view, tanh, dropout and another product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).view(-1, 4, 4).tanh()
        return self.down(nn.functional.dropout(hidden, 0.5).view(-1, 16))


@pytest.fixture
def joint(joint_graph_of):
    torch.manual_seed(0)
    return joint_graph_of(Small(), torch.randn(6, 8, requires_grad=True))


def value_named(joint, name):
    (value,) = [value for value, node in zip(joint.kind.values, joint.nodes, strict=True) if short_name(node) == name]
    return value


def test_values_are_tensors_of_forward_without_views_and_parameters(joint):
    assert not any(is_view(node) or is_getitem(node) for node in joint.nodes)
    names = [short_name(node) for node in joint.nodes]
    assert names.count("mm") == 2, "the products of forward, and none of backward"
    inputs = [node for node in joint.nodes if node.op == "placeholder"]
    assert len(inputs) == 1, "the input with a gradient; parameters stay allocated anyway"
    assert tuple(inputs[0].meta["val"].shape) == (6, 8)
    assert joint.forward >= {*joint.nodes, *joint.operators}


class Routed(Small):
    def forward(self, x: Tensor) -> Tensor:
        scores, order = self.up(x).topk(4, dim=0)
        return self.down(self.up(x).gather(0, order).tanh() * scores)


def test_indices_that_are_chosen_from_data_and_their_scores_are_not_recomputed(joint_graph_of):
    values = joint_graph_of(Routed(), torch.randn(6, 8, requires_grad=True)).kind.values
    assert [(value.dtype, value.recomputable) for value in values if value.is_decision] == [
        ("float32", False),
        ("int64", False),
    ]
    assert any(value.recomputable for value in values)


def test_what_backward_reads_is_saved(joint):
    assert value_named(joint, "tanh").saved
    last_product = [v for v, node in zip(joint.kind.values, joint.nodes, strict=True) if short_name(node) == "mm"][-1]
    assert not last_product.saved, "nothing of backward reads the result"
    assert set(joint.kind.slots) == {value.index for value in joint.kind.values if value.saved}


def test_casts_of_parameters_are_told_by_their_role(joint_graph_of):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x.bfloat16() @ self.weight.bfloat16()).float()

    joint = joint_graph_of(Cast(), torch.randn(4, 8, requires_grad=True))
    roles = {value.shape: value.role for value in joint.kind.values if value.dtype == "bfloat16"}
    assert roles[8, 8] == "parameter"
    assert roles[4, 8] == "other"


def test_what_a_kernel_fuses_is_not_written(joint_graph_of):
    joint = joint_graph_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU()), torch.randn(4, 8, requires_grad=True))
    by_name = {short_name(node): node for node in joint.nodes}
    assert is_materialized(by_name.get("addmm", by_name.get("mm")))
    assert not is_materialized(by_name["tanh"])
