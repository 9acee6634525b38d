"""The formulas: error bounds on every element, rounding, packing, and tracing of the references."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adacc_hf.kernels import _symmetric, asymmetric_int4
from adacc_hf.kernels.codecs import get_codec

FACTORS = {-1 / 8: 4, 1 / 8: 4, 1 / 127: 8}  # bits of a code, by the factor from peak to scale
GROUPS, SIZE = 6, 16


def _groups(seed: int, dtype: torch.dtype) -> Tensor:
    """Draw [GROUPS, SIZE] elements whose magnitudes range over 2^-40 to 2^15, with signs and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(GROUPS, SIZE, generator=generator) * torch.exp2(
        torch.randint(-40, 13, (GROUPS, 1), generator=generator).float()
    )
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    return x.to(dtype)


def _steps_bound(steps: Tensor, least: int, most: int) -> Tensor:
    """Return the allowed error of decoded values in steps: half a step, or the clipped part."""
    return torch.maximum(least - steps, steps - most).clamp(min=0.5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(_symmetric.FLOAT_DTYPES),
    factor=st.sampled_from(sorted(FACTORS)),
)
def test_symmetric_error_is_within_the_bound_on_every_element(seed, dtype, factor):
    x, bits = _groups(seed, dtype), FACTORS[factor]
    codes, peaks = _symmetric.encode_ref(x, bits, factor)
    restored = _symmetric.decode_ref(codes, peaks, bits, factor, dtype).double()
    zero, least, most = _symmetric.CODE_RANGES[bits]
    step = (peaks.double() * factor)[:, None]
    steps = torch.where(step == 0, 0.0, x.double() / step)
    bound = _steps_bound(steps, least - zero, most - zero) * step.abs()
    # Bound the rounding of the shifted steps to float32 (at most 2^8 steps, so 2^-15 of one) and of the result to the
    # dtype.
    finfo = torch.finfo(dtype)
    slack = step.abs() * 2**-15 + restored.abs() * finfo.eps + finfo.tiny * finfo.eps
    assert bool(((restored - x.double()).abs() <= bound + slack).all())
    # Clipping costs at most one step where codes end at 7 or 127, and the truncation of a float32 peak.
    truncation = 2.0**-7 if dtype == torch.float32 else 0.0
    assert float((bound / step.abs()).nan_to_num(0.0).max()) <= 1 + (most - zero + 1) * truncation + 2**-15


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(_symmetric.FLOAT_DTYPES),
    shift=st.sampled_from([0.0, 1.0, -100.0]),
)
def test_asymmetric_error_is_within_the_bound_on_every_element(seed, dtype, shift):
    x = (_groups(seed, torch.float32).clamp(-1e4, 1e4) + shift).to(dtype)
    codec = get_codec("asymmetric_int4", group_size=SIZE)
    codes, offsets, half_ranges = codec.encode_traceable(x)
    restored = codec.decode_traceable((codes, offsets, half_ranges), tuple(x.shape), dtype).double()
    step = (half_ranges.double() * 2 * asymmetric_int4.FACTOR)[:, None]
    steps = torch.where(step == 0, 0.0, (x.double() - offsets.double()[:, None]) / step)
    bound = _steps_bound(steps, 0, 15) * step
    # The sum of offset and steps is rounded as well, and half ranges below 2^-100 leave only one code.
    finfo = torch.finfo(dtype)
    slack = step * 2**-15 + (restored.abs() + offsets.double().abs()[:, None]) * finfo.eps + 2.0**-99
    slack = slack + finfo.tiny * finfo.eps
    assert bool(((restored - x.double()).abs() <= bound + slack).all())


def test_the_signed_scale_is_exact_at_the_peak_where_the_papers_clips() -> None:
    x = torch.tensor([[0.5, 8.0, -4.0, 1.0], [0.0, -8.0, 4.0, 0.0]]).repeat(1, 4)
    signed = _symmetric.decode_ref(*_symmetric.encode_ref(x, 4, -1 / 8), 4, -1 / 8, x.dtype)
    paper = _symmetric.decode_ref(*_symmetric.encode_ref(x, 4, 1 / 8), 4, 1 / 8, x.dtype)
    assert signed[0, :4].tolist() == [0.0, 8.0, -4.0, 1.0]  # 0.5 is half a step of -1 and rounds up, to -0
    assert paper[0, :4].tolist() == [1.0, 7.0, -4.0, 1.0]
    assert paper[1, :4].tolist() == signed[1, :4].tolist() == [0.0, -8.0, 4.0, 0.0]


def test_zeros_of_a_causal_mask_stay_zero_in_softmax() -> None:
    attention = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    attention[:, 40:] = 0
    codec = get_codec("asymmetric_int4")
    restored = codec.decode_traceable(codec.encode_traceable(attention), (8, 64), torch.float32)
    assert bool((restored[:, 40:] == 0).all())
    assert bool((restored[:, :40].amax(1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaks_survive_in_sixteen_bits(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[1.0, -largest], [largest, 0.0], [3.0, -3.0]], dtype=dtype)
    peaks = _symmetric.peaks_ref(x, signed=True)
    assert peaks.dtype == torch.bfloat16
    bfloat16_max = torch.finfo(torch.bfloat16).max
    assert peaks.tolist() == [-bfloat16_max, bfloat16_max, -3.0]  # truncated, not infinity; negative wins a tie


@pytest.mark.parametrize("pack", [_symmetric.packed_at_once, _symmetric.packed_side_by_side])
@pytest.mark.parametrize("groups", [0, 4])
def test_packing_is_undone(pack: Callable[..., tuple[Tensor, ...]], groups: int) -> None:
    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = x.to(torch.uint8)
        return codes, codes.sum(1)

    codes = torch.arange(16).repeat(groups).view(groups, 16)
    packed, sums = pack(encode, codes)
    assert torch.equal(_symmetric.unpack_ref(packed), codes.to(torch.uint8))
    assert torch.equal(sums, torch.full((groups,), 120))


SHAPE, FLOAT = (20, 8), torch.float32
