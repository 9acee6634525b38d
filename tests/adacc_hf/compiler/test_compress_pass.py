"""Codecs inside a pair of graphs: the bits of the eager codec, in the strides of the original. Gradients that are a sum
with a product keep their bits if addmm fusion is prevented."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.compress_pass import compress_saved, memory_order, prevent_addmm_fusion
from adacc_hf.kernels.codecs import get_codec

aten = torch.ops.aten
SIZE = (4, 6, 32)
STRIDES = {"contiguous": (0, 1, 2), "permuted": (1, 0, 2), "transposed": (0, 2, 1)}


CODECS = {
    "outlier_int4": {},
    "outlier_int4-raw": {"num_outliers": 3},
    "channel_int4": {},
    "asymmetric_int4": {},
    "token_int4": {},
    "fp8": {},
    "int8": {},
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("order", STRIDES.values(), ids=STRIDES)
def test_backward_gets_what_the_eager_codec_gives(codec: str, order: tuple[int, ...]) -> None:
    name, options = codec.partition("-")[0], CODECS[codec]
    with FakeTensorMode():
        x = torch.empty(SIZE).permute(order)
        # Forward returns a result and saves a value; backward reads the value and a gradient.
        forward = make_fx(lambda x: (x.sum(), x.sin().as_strided(x.shape, x.stride())))(x)
        gradient = torch.empty(SIZE).permute(order)
        backward = make_fx(lambda saved, gradient: (saved * gradient,))(x, gradient)
    saved = forward.graph.find_nodes(op="output")[0].args[0][1]
    placeholder = backward.graph.find_nodes(op="placeholder")[0]
    placeholder.name = saved.name
    compress_saved(forward, backward, {saved.name: get_codec(name, **options)}, 1)

    value = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).permute(order)
    _, *payload = forward(value)
    (restored,) = backward(*payload, torch.ones(()))
    eager = get_codec(name, **options)
    expected = value.sin().permute(memory_order(value))
    decoded = eager.decode(eager.encode(expected))
    assert sum(t.nbytes for t in payload) == eager.predicted_bytes(tuple(expected.shape), torch.float32)
    assert restored.stride() == value.stride()
    assert torch.equal(restored.permute(memory_order(value)), decoded)


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
