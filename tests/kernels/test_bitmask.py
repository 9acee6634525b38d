"""Masks: eight elements per byte, accepted only for tensors of two values."""

import pytest
import torch

from adacc_hf.kernels.codecs import get_codec


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 100_003])
def test_boolean_masks_take_a_bit_an_element(numel: int) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(0)) > 0.1
    codec = get_codec("bitmask")
    payload = codec.encode(mask)
    assert payload.nbytes == -(-numel // 8) == codec.predicted_bytes((numel,), torch.bool)
    restored = codec.decode(payload)
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64])
@pytest.mark.parametrize("true_value", [1, 113])
def test_masks_of_other_dtypes_are_lossless(dtype: torch.dtype, true_value: int) -> None:
    mask = (torch.rand(1001, generator=torch.Generator().manual_seed(0)) > 0.5).to(dtype) * true_value
    codec = get_codec("bitmask")
    assert codec.accepts(mask)
    payload = codec.encode(mask)
    assert payload.nbytes == 126 + dtype.itemsize
    assert torch.equal(codec.decode(payload), mask)


@pytest.mark.parametrize(
    ("values", "accepted"),
    {
        "zeros": ([0.0, 0.0], True),
        "one value": ([2.0, 2.0], True),
        "two values": ([0.0, 2.0], True),
        "negative": ([0.0, -1e9], True),
        "two values, neither zero": ([1.0, 2.0], False),
        "three values": ([0.0, 1.0, 2.0], False),
        "zeros of both signs": ([0.0, -0.0, 1.0], False),
        "both signs": ([0.0, 1.0, -1.0], False),
    }.values(),
)
def test_only_zero_and_one_other_value_are_accepted(values: list[float], accepted: bool, dtype: torch.dtype) -> None:
    assert get_codec("bitmask").accepts(torch.tensor(values).to(dtype)) is accepted
