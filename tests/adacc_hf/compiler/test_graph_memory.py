"""Live bytes of graphs, against counts by hand."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.graph_memory import most_live_bytes

SQUARE = 4 * 8 * 8


def _most(function: object, *elsewhere: str) -> int:
    inputs = [torch.zeros(8, 8) for _ in range(2)]
    return most_live_bytes(make_fx(function)(*inputs).graph, set(elsewhere))


def test_what_is_fused_takes_nothing_and_a_result_is_written_over_what_dies() -> None:
    assert _most(lambda x, y: (((x.sin() + y).cos() * y).exp(),)) == 2 * SQUARE


def test_products_lie_in_memory_with_what_they_read() -> None:
    # Inputs x, y; x.sin() is written over x, and the product lives next to both.
    assert _most(lambda x, y: (x.sin() @ y,)) == 3 * SQUARE
    # The first product outlives x; with the second one, x and y are freed.
    assert _most(lambda x, y: (x @ y @ y,)) == 3 * SQUARE


def test_inputs_that_somebody_else_holds_do_not_count() -> None:
    assert _most(lambda x, y: (x @ y,), "x_1") == 2 * SQUARE
    assert _most(lambda x, y: (x @ y,), "x_1", "y_1") == SQUARE


def test_gradients_live_until_the_end() -> None:
    def graph(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = x @ y, y @ x
        return first, second, (x + y) @ y

    # Both inputs, two results, and for the third x + y, written over x, and the third itself.
    assert _most(graph) == 5 * SQUARE


def test_reductions_lie_in_memory() -> None:
    def graph(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        most = x.amax(1, keepdim=True)
        return most, (x - most).exp() @ y

    assert _most(graph) == 3 * SQUARE + 4 * 8
