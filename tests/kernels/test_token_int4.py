"""The naive baseline: one scale per row, with the paper's formula."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_a_row_has_one_scale_of_the_papers_kind() -> None:
    codec = get_codec("token_int4")
    x = torch.tensor([[1.0, -2.0, 8.0], [0.5, 0.25, -4.0]])
    assert codec.encode(x).tensors[1].tolist() == [8.0, 4.0]
    # The steps are 1 and 0.5. The peak of the first row is clipped to 7 steps, that of the second is -8 steps.
    assert codec.decode(codec.encode(x)).tolist() == [[1.0, -2.0, 7.0], [0.5, 0.5, -4.0]]


def test_odd_rows_and_rows_longer_than_any_group_round_trip() -> None:
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    codec = get_codec("token_int4")
    payload = codec.encode(x)
    assert payload.nbytes == 2 * 5000 + 4 * 2 == codec.predicted_bytes((3, 5000), torch.float32)
    step = x.abs().amax(1, keepdim=True) / 8
    # A positive peak is clipped by one step. The truncation of the float32 peak is at most 2^-7 of 8 steps.
    assert bool(((codec.decode(payload) - x).abs() <= step * (1.0 + 8 * 2**-7)).all())
