"""A joint graph read as one kind of block: its values, its operators, and what backward reads."""

import pytest
import torch
from torch import Tensor, nn

from adacc_hf.compiler.functorch import is_getitem, is_view, short_name
from adacc_hf.compiler.joint_graph import is_materialized, nbytes_of, readers, root_of, source_nodes


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


def test_a_view_stands_for_what_it_shows(joint):
    first_product = next(node for node in joint.nodes if short_name(node) == "mm")
    (view,) = [node for node in first_product.users if is_view(node)]
    assert root_of(view) is first_product
    assert joint.value_of(view) == joint.value_of(first_product) is not None
    assert [short_name(node) for node in readers(first_product)] == ["tanh"]
    assert joint.value_of(view.graph.find_nodes(op="placeholder")[0]) is None, "a weight is no value"


def test_what_backward_reads_is_saved(joint):
    assert value_named(joint, "tanh").saved
    last_product = [v for v, node in zip(joint.kind.values, joint.nodes, strict=True) if short_name(node) == "mm"][-1]
    assert not last_product.saved, "nothing of backward reads the result"
    assert set(joint.kind.slots) == {value.index for value in joint.kind.values if value.saved}


def test_values_know_their_bytes_and_producers(joint):
    tanh = value_named(joint, "tanh")
    assert tanh.nbytes == nbytes_of(joint.nodes[tanh.index]) == 6 * 16 * 4
    assert tanh.shape == (6, 4, 4)
    operator = joint.kind.operators[tanh.producer]
    assert operator.outputs == (tanh.index,)
    assert [short_name(joint.nodes[value]) for value in operator.inputs] == ["mm"]
    assert tanh.recomputable
    assert operator.replayable


def test_random_values_are_not_recomputed(joint):
    random = [v for v in joint.kind.values if v.producer is not None and not v.recomputable]
    names = {short_name(joint.nodes[value.index]) for value in random}
    assert names
    assert not names & {"mm", "tanh", "mul"}


def test_sources_of_a_node_of_backward_are_the_values_it_is_computed_from(joint):
    graph = joint.nodes[0].graph
    backward_nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and root_of(node) not in joint.forward and not is_view(node)
    ]
    last = backward_nodes[-1]
    assert joint.source_values([last]) <= set(range(len(joint.nodes)))
    assert value_named(joint, "tanh").index in joint.source_values(backward_nodes)
    tanh = joint.nodes[value_named(joint, "tanh").index]
    assert list(source_nodes([tanh], {tanh})) == [tanh]


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
