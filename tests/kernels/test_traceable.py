"""The codecs as plain operators: the same bits as `encode` and `decode`, in a graph that serves any tensor."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from adacc_hf.kernels.codecs import Codec, get_codec

SIZE = (3, 5, 40)  # 600 elements, no multiple of a group


def _tensor(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_traced_codecs_give_the_bits_of_the_eager_ones(lossy: Codec, dtype: torch.dtype) -> None:
    encoded = lossy.encode_traceable(_tensor(dtype))
    encode = make_fx(lambda tensor: lossy.encode_traceable(tensor))(_tensor(dtype))
    decode = make_fx(lambda *tensors: lossy.decode_traceable(tensors, SIZE, dtype))(*encoded)
    other_tensor = _tensor(dtype, seed=1)
    lossy.fit(other_tensor)
    payload = lossy.encode(other_tensor)
    encoded = encode(other_tensor)
    assert all(
        torch.equal(tensor, payload_tensor) for tensor, payload_tensor in zip(encoded, payload.tensors, strict=True)
    )
    assert torch.equal(decode(*encoded), lossy.decode(payload))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_a_traced_bitmask_is_lossless(dtype: torch.dtype) -> None:
    codec = get_codec("bitmask")
    mask = torch.where(_tensor(torch.float32) > 0, -2.5, 0.0).to(dtype)
    encoded = make_fx(lambda tensor: codec.encode_traceable(tensor))(torch.zeros_like(mask))(mask)
    assert sum(t.nbytes for t in encoded) == codec.predicted_bytes(SIZE, dtype)
    assert torch.equal(codec.decode_traceable(encoded, SIZE, dtype), mask)


def test_a_graph_chooses_its_outliers_from_every_tensor_anew() -> None:
    codec = get_codec("outlier_int4", num_outliers=2)
    encode = make_fx(lambda tensor: codec.encode_traceable(tensor))(_tensor(torch.float32))
    for channels in ([3, 17], [0, 39]):
        tensor = _tensor(torch.float32)
        tensor[..., channels] *= 100.0
        encoded = encode(tensor)
        assert encoded[-1].tolist() == channels
        decoded = codec.decode_traceable(encoded, SIZE, torch.float32)
        assert torch.equal(decoded[..., channels], tensor[..., channels])
