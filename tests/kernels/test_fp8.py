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
from adacc_hf.kernels.codecs import codecs_suiting, get_codec, replacements

DTYPES = _symmetric.FLOAT_DTYPES
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


def test_every_code_stands_for_torchs_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # these codes are NaN, and no encoder produces them
    numbers = codes.view(torch.float8_e4m3fn).float()
    peaks = torch.full((codes.numel(),), 448.0, dtype=torch.bfloat16)
    codec = get_codec("fp8", group_size=16)
    decoded = codec.decode_traceable((codes[:, None], peaks), (codes.numel(), 1), torch.float32)[:, 0]
    compiled = torch.empty(codes.numel(), 1)
    _cpu.run_fp8("decode", compiled, codes[:, None], peaks, 16, fp8.FACTOR)
    assert torch.equal(decoded, numbers)
    assert torch.equal(compiled[:, 0], numbers)
    assert torch.equal(decoded.signbit(), numbers.signbit())


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    """Draw tensors of any shape and dtype, with elements from denormal to the largest of the dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = [*draw(st.lists(st.integers(1, 5), max_size=3)), draw(st.integers(1, 300))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numel = torch.Size(shape).numel()
    exponents = torch.randint(-150, 128, (), generator=generator) + torch.randint(-12, 1, (numel,), generator=generator)
    memory = torch.randn(numel, generator=generator)
    memory *= torch.exp2(exponents.double()).float()
    extremes = draw(st.sampled_from([(), (0.0, -0.0), (3.4e38, -3.4e38), (1e-45, -1e-40), (65504.0, 6e-8)]))
    for place, value in enumerate(extremes):
        memory[place * 7 % numel] = value
    most = torch.finfo(dtype).max
    memory = memory.nan_to_num(0.0, most, -most).clamp(-most, most).to(dtype)
    return memory.view(shape)


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
    for row in x.view(-1, x.shape[-1]):
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
    assert torch.equal(restored.view(-1), torch.cat(expected))
    assert payload.nbytes == codec.predicted_bytes(tuple(x.shape), x.dtype)
    assert bool(restored.isfinite().all())


def test_fp8_replaces_int8_for_block_inputs() -> None:
    assert codecs_suiting("input") == ["fp8", "int8"]
    assert replacements("int8", "input") == ["fp8"]
    assert replacements("int8", "linear") == replacements("fp8", "input") == []
