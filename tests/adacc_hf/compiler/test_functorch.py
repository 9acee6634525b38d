"""The interface to torch's compiler: what a graph's nodes are."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.functorch import (
    has_unknown_sizes,
    hint,
    is_getitem,
    is_random,
    is_view,
    maker_of,
    makes_sizes,
    short_name,
)

aten = torch.ops.aten


def graph_of(function, *inputs, **options) -> fx.Graph:
    return make_fx(function, **options)(*inputs).graph


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    """Return the only node whose operator has this short name."""
    (node,) = [node for node in graph.nodes if short_name(node) == name]
    return node


@pytest.mark.parametrize(
    ("function", "is_drawn"),
    [
        (torch.bernoulli, True),
        (torch.rand_like, True),
        (lambda x: F.dropout(x, 0.5), True),
        (torch.exp, False),
        (torch.empty_like, False),
    ],
)
def test_random_operators(function, is_drawn):
    assert any(map(is_random, graph_of(function, torch.rand(4)).nodes)) == is_drawn


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_random_where_it_drops_something(dropout):
    graph = fx.Graph()
    query = graph.placeholder("query")
    attention = aten._scaled_dot_product_flash_attention.default
    assert is_random(graph.call_function(attention, (query, query, query, dropout))) == (dropout > 0)
    assert is_random(graph.call_function(attention, (query, query, query), {"dropout_p": dropout})) == (dropout > 0)
    assert not is_random(graph.call_function(attention, (query, query, query))), "the default is 0"


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (lambda x: x.view(-1), "view", True),
        (lambda x: x.t(), "t", True),
        (lambda x: x[1:], "slice", True),
        (lambda x: x.exp(), "exp", False),
        (lambda x: x.clone(), "clone", False),
    ],
)
def test_views(function, name, expected):
    assert is_view(node_of(graph_of(function, torch.ones(4, 4)), name)) == expected


def test_results_of_one_operator_have_one_maker():
    graph = graph_of(lambda x: aten.native_layer_norm(x, [4], None, None, 1e-5)[:2], torch.ones(2, 4))
    norm = node_of(graph, "native_layer_norm")
    results = [node for node in graph.nodes if is_getitem(node)]
    assert len(results) >= 2
    assert {maker_of(node) for node in results} == {norm}
    assert maker_of(norm) is norm
    assert not is_getitem(norm)


def test_sizes_that_depend_on_data_are_unknown():
    graph = graph_of(lambda x: x.nonzero() * 2, torch.ones(4), tracing_mode="symbolic")
    nonzero = node_of(graph, "nonzero")
    assert makes_sizes(nonzero)
    assert has_unknown_sizes(nonzero.meta["val"])
    assert not makes_sizes(node_of(graph, "mul"))
    graph = graph_of(torch.exp, torch.ones(4, 4), tracing_mode="symbolic")
    exp = node_of(graph, "exp")
    assert not has_unknown_sizes(exp.meta["val"])
    assert not makes_sizes(exp)
    assert hint(exp.meta["val"].shape[0]) == hint(4) == 4
