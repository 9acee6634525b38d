"""Offsets and scales: one-sided groups use all sixteen codes."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_sixteen_evenly_spaced_values_are_exact() -> None:
    x = (100.0 + torch.arange(16.0)).repeat(4)
    codec = get_codec("asymmetric_int4")
    # 15 steps of fl(1 / 15) of 7.5 * 2: each rounds in float32 at magnitude 115.
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, rtol=2**-22, atol=0)
