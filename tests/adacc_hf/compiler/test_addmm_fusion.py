"""Gradients that are a sum with a product keep their bits if addmm fusion is prevented."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.compress_pass import prevent_addmm_fusion

aten = torch.ops.aten


@pytest.mark.parametrize("product_first", [True, False], ids=["product-first", "product-last"])
def test_a_gradient_has_the_same_bits_without_a_sum_that_becomes_an_addmm(product_first: bool) -> None:
    def backward(of_logits: Tensor, hidden: Tensor, of_tokens: Tensor) -> tuple[Tensor]:
        of_head, of_embedding = of_logits.t() @ hidden, of_tokens.sin()
        return (of_head + of_embedding if product_first else of_embedding + of_head,)

    inputs = [torch.randn(6, 5), torch.randn(6, 4), torch.randn(5, 4)]
    inputs[0][:, 0], inputs[2][0] = 0.0, -0.0  # sums of zeros have a sign too
    graph = make_fx(backward)(*inputs)
    (expected,) = graph(*inputs)
    prevent_addmm_fusion(graph)
    assert not graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (gradient,) = graph(*inputs)
    assert torch.equal(gradient.view(torch.int32), expected.view(torch.int32))


def test_other_sums_stay() -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    graph = make_fx(lambda x, y: ((x @ y + x).sin(), x + y, x @ y + 1.0))(*inputs)
    prevent_addmm_fusion(graph)
    assert len(graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)) == 3
    graph(*inputs)
