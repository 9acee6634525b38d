"""Outlier channels are found by the paper's Z-score and stored raw. Only fit chooses them."""

import pytest
import torch
from torch import Tensor

from adacc_hf.kernels.codecs import get_codec
from adacc_hf.kernels.outlier_int4 import channel_sums, zscores


def _with_outliers(channels: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(0))
    x[..., list(channels)] *= 100
    return x.to(dtype)


def test_zscores_follow_equation_1() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0, 6.0], [-1.0, 1.0, 2.0, 6.0]])
    # sums 2, 2, 2, 12: mean 4.5, deviation sqrt((3 * 2.5^2 + 7.5^2) / 4)
    assert channel_sums(x).tolist() == [2.0, 2.0, 2.0, 12.0]
    torch.testing.assert_close(zscores(channel_sums(x))[3], torch.tensor(7.5 / 18.75**0.5))


def test_outlier_channels_are_exact_and_help_the_rest(dtype: torch.dtype) -> None:
    x = _with_outliers((7, 20, 64), dtype)
    with_raw, without = get_codec("outlier_int4", num_outliers=3), get_codec("outlier_int4")
    restored = with_raw.decode(with_raw.encode(x))
    torch.testing.assert_close(restored[..., [7, 20, 64]], x[..., [7, 20, 64]], rtol=0, atol=0)
    is_inlier = torch.ones(96, dtype=torch.bool)
    is_inlier[[7, 20, 64]] = False
    error = (restored - x)[..., is_inlier].float().norm()
    error_without = (without.decode(without.encode(x)) - x)[..., is_inlier].float().norm()
    assert error < error_without / 5


def test_the_payload_holds_indices_and_raw_values() -> None:
    x = _with_outliers((7, 20, 64))
    codec = get_codec("outlier_int4", num_outliers=3)
    codes, peaks, raw, indices = codec.encode(x).tensors
    assert indices.tolist() == [7, 20, 64]
    torch.testing.assert_close(raw, x.view(-1, 96)[:, [7, 20, 64]], rtol=0, atol=0)
    assert codes.nbytes == x.numel() // 2
    assert peaks.nbytes == x.numel() // 64 * 2


def test_channels_change_only_when_fitted_again() -> None:
    codec = get_codec("outlier_int4", num_outliers=1)
    first, second = _with_outliers((7,)), _with_outliers((20,))
    assert codec.encode(first).tensors[3].tolist() == [7]
    old = codec.encode(second)
    assert old.tensors[3].tolist() == [7]
    codec.fit(second)
    assert codec.encode(second).tensors[3].tolist() == [20]
    # A payload encoded before the change still decodes with its own channels.
    restored = codec.decode(old)
    torch.testing.assert_close(restored[..., 7], second[..., 7], rtol=0, atol=0)
    assert (restored - second)[..., 20].abs().max() > 0


def test_an_infinite_outlier_channel_is_kept_as_it_is() -> None:
    x = _with_outliers((7,))
    x[0, 0, 7] = float("inf")
    codec = get_codec("outlier_int4", num_outliers=1)
    restored = codec.decode(codec.encode(x))
    torch.testing.assert_close(restored[..., 7], x[..., 7], rtol=0, atol=0)
    assert restored.isfinite().sum() == x.numel() - 1


def test_more_outliers_than_channels_are_not_supported() -> None:
    assert not get_codec("outlier_int4", num_outliers=5).supports((8, 4), torch.float32)


def test_a_codec_fitted_to_another_activation_is_refused() -> None:
    codec = get_codec("outlier_int4", num_outliers=1)
    codec.encode(torch.randn(8, 16))
    with pytest.raises(ValueError, match="fitted to 16 channels of 4 bytes per element and got 32 of 4"):
        codec.encode(torch.randn(8, 32))


@pytest.mark.parametrize(("num_outliers", "rate"), [(0, 2 / (0.5 + 2 / 64)), (8, 2 / (0.5 + 2 / 64 + 2 * 8 / 768))])
def test_compression_rate_of_a_gpt2_activation(num_outliers: int, rate: float) -> None:
    shape = (8, 1024, 768)
    codec = get_codec("outlier_int4", num_outliers=num_outliers)
    plain = 8 * 1024 * 768 * 2
    # The rate per element omits only the 32 bytes of indices.
    assert plain / codec.predicted_bytes(shape, torch.bfloat16) == pytest.approx(rate, rel=1e-4)
