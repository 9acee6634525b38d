"""Eight bits: errors are a sixteenth of those of four bits."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_error_is_a_sixteenth_of_four_bits(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    errors = {}
    for name in ("int8", "outlier_int4"):
        codec = get_codec(name)
        errors[name] = float((codec.decode(codec.encode(x)) - x).float().norm())
    # The steps are 127 / 8 = 16 times finer. bfloat16 itself rounds by 2^-9, half as much as an eight-bit step of a
    # peak of three standard deviations.
    assert errors["int8"] < errors["outlier_int4"] / (10 if dtype == torch.bfloat16 else 15)
