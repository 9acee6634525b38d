"""The interface to torch's compiler: what a graph's nodes are."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler import functorch
from adacc_hf.compiler.functorch import (
    has_unknown_sizes,
    hint,
    is_getitem,
    is_random,
    is_view,
    maker_of,
    makes_sizes,
    must_be_saved,
    prepare,
    recompile_limit,
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


def test_seeds_of_inductor_are_random():
    graph = fx.Graph()
    assert is_random(graph.call_function(torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu"))))
    assert not is_random(graph.placeholder("x"))


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


def test_names_are_without_overloads_and_underscores():
    assert short_name(node_of(graph_of(lambda x: x.softmax(-1), torch.ones(2, 4)), "softmax")) == "softmax"
    assert short_name(fx.Graph().placeholder("x")) == ""


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


def test_an_input_that_forward_writes_to_is_read_from_a_copy():
    """Backward finds the written value in the input. A value computed from the old one must not be recomputed there."""

    def forward(x):
        y = x.exp()
        x.copy_(x + 1)
        return y

    module = make_fx(forward, tracing_mode="fake")(torch.ones(4))
    assert prepare(module) is None
    copied = node_of(module.graph, "clone")
    assert must_be_saved(copied)
    assert node_of(module.graph, "exp").args[0] is copied
    assert node_of(module.graph, "add").args[0] is copied
    (write,) = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert write.args[0].op == "placeholder"
    assert not must_be_saved(write)


def test_an_input_that_is_only_read_has_no_copy():
    module = make_fx(torch.exp, tracing_mode="fake")(torch.ones(4))
    assert prepare(module) is None
    assert not [node for node in module.graph.nodes if short_name(node) == "clone"]


def test_equal_operators_are_one():
    module = make_fx(lambda x: x.exp() + x.exp())(torch.ones(4))
    prepare(module)
    node_of(module.graph, "exp")


def test_outside_of_a_compilation_there_are_no_numbers():
    assert functorch.compile_number() == ("", "")
    assert functorch.graph_number() is None
    assert list(functorch.graph_calls(torch.ones(2, requires_grad=True).exp())) == []
    assert functorch.code_of(None, "compiled_fw") is None
    assert recompile_limit() > 0
