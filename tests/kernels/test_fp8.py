"""FP8: every path rounds like torch's cast, each group of a row has a scale, and errors are below INT8's next to a
large peak."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric, fp8
from adacc_hf.kernels._layout import as_matrix
from adacc_hf.kernels.codecs import codecs_suiting, get_codec, replacements

DTYPES = _symmetric.FLOAT_DTYPES
LARGEST = 448 * (1 + 2**-7)  # a float32 peak is truncated by this fraction of an element, in steps of its scale
PATHS = ("cpp", "reference")


@contextmanager
def _path(name: str) -> Iterator[None]:
    """Return the encoder and decoder in C++, or the plain references."""
    assert _cpu.library() is not None, "these tests need a C++ compiler"
    with patch.object(_cpu, "library", _cpu.library if name == "cpp" else lambda: None):
        yield


def _cast(x: Tensor) -> Tensor:
    """Return the codes of torch's own cast."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _codes(scaled: Tensor, path: str) -> Tensor:
    """Return the codes of float32 elements unscaled: each is in a group with a peak of 448, whose scale is 1."""
    x = torch.full((scaled.numel(), 16), 448.0)
    x[:, 3] = scaled
    with _path(path):
        codes, peaks = get_codec("fp8", group_size=16).encode(x).tensors
    assert bool((peaks == 448).all())
    return codes[:, 3]


def _boundaries() -> Tensor:
    """Return all numbers of E4M3 and all midpoints between two, with the neighbouring float32 on both sides, and signs
    and zeros."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    around = torch.cat([points, points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(1e9))])
    around = around[around <= 448]
    return torch.cat([around, -around])


@pytest.mark.parametrize("path", PATHS)
def test_numbers_and_midpoints_of_e4m3_are_rounded_as_torch_casts(path: str) -> None:
    x = _boundaries()
    assert torch.equal(_codes(x, path), _cast(x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_sixteen_bit_number_is_rounded_as_torch_casts(dtype: torch.dtype, path: str) -> None:
    x = torch.arange(2**16).to(torch.int16).view(dtype).float()
    x = x[x.abs() <= 448]
    assert x.numel() > 30_000
    assert torch.equal(_codes(x, path), _cast(x))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=64))
def test_any_float32_is_rounded_as_torch_casts(values: list[float]) -> None:
    x = torch.tensor(values)
    assert torch.equal(fp8.codes_ref(x, None), _cast(x))
    clipped = x.clamp(-448, 448)
    assert torch.equal(_codes(clipped, "cpp"), _cast(clipped))


def test_every_code_stands_for_torchs_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # these codes are NaN, and no encoder produces them
    numbers = codes.view(torch.float8_e4m3fn).float()
    peaks = torch.full((codes.numel(),), 448.0, dtype=torch.bfloat16)
    decoded = fp8.decode_ref(torch.float32, 16, codes[:, None], peaks)[:, 0]
    compiled = torch.empty(codes.numel(), 1)
    _cpu.decode_fp8(compiled, codes[:, None], peaks, 16, fp8.FACTOR)
    assert torch.equal(decoded, numbers)
    assert torch.equal(compiled[:, 0], numbers)
    assert torch.equal(decoded.signbit(), numbers.signbit())


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    """Draw tensors of any shape, dtype, stride and offset, with elements from denormal to the largest of the dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = [*draw(st.lists(st.integers(1, 5), max_size=3)), draw(st.integers(1, 300))]
    order = draw(st.permutations(range(len(shape))))
    step, offset = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numel = torch.Size(shape).numel()
    exponents = torch.randint(-150, 128, (), generator=generator) + torch.randint(-12, 1, (numel,), generator=generator)
    memory = torch.randn(offset + step * numel, generator=generator)
    memory[offset::step] *= torch.exp2(exponents.double()).float()
    extremes = draw(st.sampled_from([(), (0.0, -0.0), (3.4e38, -3.4e38), (1e-45, -1e-40), (65504.0, 6e-8)]))
    for place, value in enumerate(extremes):
        memory[offset + step * (place * 7 % numel)] = value
    most = torch.finfo(dtype).max
    memory = memory.nan_to_num(0.0, most, -most).clamp(-most, most).to(dtype)
    return memory[offset::step][:numel].view(shape).permute(order)


@settings(max_examples=200, deadline=None)
@given(x=_tensors(), group_size=st.sampled_from((16, 128, 1024)), path=st.sampled_from(PATHS))
def test_groups_of_any_tensor_are_scaled_and_cast(x: Tensor, group_size: int, path: str) -> None:
    """The reference works group by group along the last dimension, with torch's own cast in place of integer
    arithmetic."""
    codec = get_codec("fp8", group_size=group_size)
    with _path(path):
        payload = codec.encode(x)
        restored = codec.decode(payload)
    codes, peaks = payload.tensors
    expected_codes, expected_peaks, expected = [], [], []
    for row in as_matrix(x):
        for group in row.split(group_size):
            peak = group.float().abs().max()
            if x.dtype == torch.float32:
                peak = (peak.view(torch.int32) & -65536).view(torch.float32)
            scale = peak * torch.tensor(1 / 448)
            inverse = scale.reciprocal() if peak >= 2.0**-100 else torch.tensor(0.0)
            cast = (group.float() * inverse).to(torch.float8_e4m3fn)
            expected_codes.append(cast.view(torch.uint8))
            expected_peaks.append(peak)
            expected.append((cast.float() * scale).to(x.dtype))
    assert torch.equal(codes.view(-1), torch.cat(expected_codes))
    assert torch.equal(peaks.float(), torch.stack(expected_peaks))
    assert torch.equal(as_matrix(restored).reshape(-1), torch.cat(expected))
    assert restored.stride() == x.stride()
    assert payload.nbytes == codec.predicted_bytes(tuple(x.shape), x.dtype)
    assert bool(restored.isfinite().all())


def test_the_largest_magnitude_comes_back_whole(dtype: torch.dtype) -> None:
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).bfloat16().to(dtype)
    codec = get_codec("fp8")
    restored = codec.decode(codec.encode(x))
    for group, back in zip(x.split(128, 1), restored.split(128, 1), strict=True):
        peaks = group.abs().amax(1, keepdim=True)
        # 448 * fl(peak / 448) in float32 rounds twice.
        torch.testing.assert_close(back[group.abs() == peaks], group[group.abs() == peaks], rtol=2**-22, atol=0)


def test_a_group_ends_with_its_row() -> None:
    """A large element in a tail of 4, at the end of one row, does not enter the peak of the next row's first group."""
    x = torch.full((3, 132), 0.3)
    x[0, 131] = 1e6
    codec = get_codec("fp8")
    codes, peaks = codec.encode(x).tensors
    assert codes.shape == x.shape
    assert peaks.view(3, 2).argmax().item() == 1
    restored = codec.decode(codec.encode(x))
    assert bool((restored[0, 128:131] == 0).all())
    # Half of the last of E4M3's 3 bits, and the truncation of the peak.
    torch.testing.assert_close(restored[:, :128], x[:, :128], rtol=2**-4 + 2**-7, atol=0)


def test_every_element_keeps_three_bits(dtype: torch.dtype) -> None:
    """The precision is independent of the distance to the peak, down to the least normal number of E4M3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.exp2(torch.randint(-16, 0, (64, 256), generator=generator))
    x = x.to(dtype)
    codec = get_codec("fp8")
    restored = codec.decode(codec.encode(x)).double()
    scale = (x.abs().double().view(64, 2, 128).amax(2) / 448).repeat_interleave(128, 1)
    # The bound is half a step: 2^-4 of a normal number, 2^-10 of the scale below. A truncated float32 peak clips its
    # element. The result is rounded to the dtype, which has steps of tiny * eps next to zero.
    finfo, truncation = torch.finfo(dtype), 2**-7 if dtype == torch.float32 else 0.0
    bound = torch.maximum(x.double().abs() * (2**-4 + truncation), scale * 2**-10)
    bound = bound + restored.abs() * finfo.eps + finfo.tiny * finfo.eps
    assert bool(((restored - x.double()).abs() <= bound).all())


@pytest.mark.parametrize("path", PATHS)
def test_stochastic_rounding_is_unbiased_and_never_passes_the_largest_number(path: str) -> None:
    x = torch.full((4096, 128), 0.3)
    x[:, 0], x[:, 1] = 448.0, 451.9  # the float32 peak is truncated to 450
    x[:, 2] = 0.3 * 2**-8  # below the least normal number
    codec = get_codec("fp8", rounding="stochastic", seed=5)
    with _path(path):
        payload = codec.encode(x)
        restored = codec.decode(payload)
    assert bool(((payload.tensors[0] & 127) < 127).all())
    # 512,000 draws between 0.28 and 0.31: a standard deviation of the mean below 3e-5. 4096 of 0 to 2^-9: 1.6e-5.
    assert abs(float(restored[:, 3:].mean()) - 0.3) < 2e-4
    assert abs(float(restored[:, 2].mean()) - 0.3 * 2**-8) < 1e-4
    assert not torch.equal(restored, get_codec("fp8").decode(get_codec("fp8").encode(x)))


def _error(name: str, x: Tensor) -> float:
    codec = get_codec(name)
    return float((codec.decode(codec.encode(x)) - x).float().norm() / x.float().norm())


def test_int8_is_more_exact_on_normal_numbers_and_fp8_below_a_large_element(dtype: torch.dtype) -> None:
    """The difference is the reason for `instead_of`."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert 2 * _error("int8", x) < _error("fp8", x) < 2**-4
    x[:, ::128] = 500.0
    assert 2 * _error("fp8", x) < _error("int8", x)


def test_fp8_takes_no_more_bytes_than_int8() -> None:
    for columns in (1, 64, 100, 128, 768, 4096):
        sizes = {name: get_codec(name).predicted_bytes((8, columns), torch.float32) for name in ("fp8", "int8")}
        assert sizes["fp8"] == 8 * (columns + 2 * -(-columns // 128))
        if columns >= 128:
            assert sizes["fp8"] <= sizes["int8"]


def test_fp8_replaces_int8_for_block_inputs() -> None:
    assert codecs_suiting("input") == ["fp8", "int8"]
    assert replacements("int8", "input") == ["fp8"]
    assert replacements("int8", "linear") == replacements("fp8", "input") == []
