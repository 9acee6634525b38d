"""Channel-wise scales: one for 64 rows of a channel, whatever the tensor's layout."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_a_scale_serves_group_size_rows_of_one_channel() -> None:
    codec = get_codec("channel_int4", group_size=16)
    x = torch.arange(1.0, 33.0)[:, None] * torch.tensor([1.0, 10.0])
    _, peaks = codec.encode(x).tensors
    assert peaks.tolist() == [[16.0, 160.0], [32.0, 320.0]]


def test_heads_transposed_for_attention_are_encoded_in_memory_order() -> None:
    memory = torch.randn(2, 64, 3, 16, generator=torch.Generator().manual_seed(0))
    codec = get_codec("channel_int4")
    plain, transposed = codec.encode(memory), codec.encode(memory.transpose(1, 2))
    for plain_tensor, transposed_tensor in zip(plain.tensors, transposed.tensors, strict=True):
        torch.testing.assert_close(plain_tensor, transposed_tensor, rtol=0, atol=0)
