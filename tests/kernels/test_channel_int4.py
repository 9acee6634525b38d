"""Channel-wise scales: one for 64 rows of a channel."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_a_scale_serves_group_size_rows_of_one_channel() -> None:
    codec = get_codec("channel_int4", group_size=16)
    x = torch.arange(1.0, 33.0)[:, None] * torch.tensor([1.0, 10.0])
    _, peaks = codec.encode(x).tensors
    assert peaks.tolist() == [[16.0, 160.0], [32.0, 320.0]]
