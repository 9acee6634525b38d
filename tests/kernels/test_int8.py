"""Eight bits: errors are a sixteenth of those of four bits."""

import torch

from adacc_hf.kernels.codecs import get_codec


def test_error_is_a_sixteenth_of_four_bits(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    errors = {}
    for name, options in (("int8", {}), ("outlier_int4", {"scale": "max7"})):
        codec = get_codec(name, **options)
        errors[name] = float((codec.decode(codec.encode(x)) - x).float().norm())
    # The steps are 127 / 7 = 18 times finer. bfloat16 itself rounds by 2^-9, half as much as an eight-bit step of a
    # peak of three standard deviations.
    assert errors["int8"] < errors["outlier_int4"] / (10 if dtype == torch.bfloat16 else 16)


def test_whole_steps_are_exact() -> None:
    x = torch.arange(-127.0, 128.0)[None].repeat(1, 1)
    codec = get_codec("int8", group_size=256)
    torch.testing.assert_close(codec.decode(codec.encode(x)), x, rtol=2**-22, atol=0)  # 127 * fl(1 / 127) rounds


def test_padding_and_scales_are_counted() -> None:
    assert get_codec("int8").predicted_bytes((65,), torch.float16) == 2 * (64 + 2)
