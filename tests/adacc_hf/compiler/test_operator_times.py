"""Operator times of a compiled graph, estimated from its traced operators."""

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.graph_cost import OperatorTimes, device_speed, function_ms, keep_ms

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def counted_times():
    """Keep measured times, here alone."""
    function_ms.cache_clear()
    yield
    function_ms.cache_clear()


def _forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = x > 0
    return mask, (x * mask).tanh() + 1, (-x - 1) @ weight, x.sum(-1)


@pytest.fixture(scope="module")
def nodes() -> dict[Any, fx.Node]:
    """The nodes of a small graph by their operator."""
    graph = make_fx(_forward, tracing_mode="fake")(torch.randn(512, 512), torch.randn(512, 512)).graph
    return {getattr(node.target, "overloadpacket", operator.getitem): node for node in graph.nodes}


def test_functions_cost_more_than_arithmetic_and_products_most(nodes: dict[Any, fx.Node]) -> None:
    aten, times = torch.ops.aten, OperatorTimes()
    add, tanh, product = (times.replay_ms(nodes[target]) for target in (aten.add, aten.tanh, aten.mm))
    assert 0 < add < tanh < product


def test_an_operator_that_a_product_reads_is_written_for_it(nodes: dict[Any, fx.Node]) -> None:
    times, speed = OperatorTimes(), device_speed(CPU)
    product_input_ms, neg_ms, add_ms = (
        times.replay_ms(nodes[getattr(torch.ops.aten, name)]) for name in ("sub", "neg", "add")
    )
    assert product_input_ms - add_ms == pytest.approx(speed.moving_ms(2 * 4 * 512 * 512))
    assert neg_ms == add_ms


def test_what_a_product_makes_is_written_anyway(nodes: dict[Any, fx.Node]) -> None:
    assert keep_ms(nodes[torch.ops.aten.add]) == pytest.approx(2 * keep_ms(nodes[torch.ops.aten.mm]))


def test_masks_are_slow_to_write_on_a_cpu(nodes: dict[Any, fx.Node]) -> None:
    assert keep_ms(nodes[torch.ops.aten.gt]) > keep_ms(nodes[torch.ops.aten.add])
