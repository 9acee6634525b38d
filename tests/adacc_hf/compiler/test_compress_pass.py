"""Codecs inside a pair of graphs: the bits of the eager codec, in the strides of the original."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.compiler.compress_pass import compress_saved, memory_order
from adacc_hf.kernels.codecs import get_codec

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
