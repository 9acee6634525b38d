"""Triton kernels are bit-equal to the references: under Triton's interpreter on the CPU, and compiled on a GPU.

Triton reads TRITON_INTERPRET when it is first imported, so the CPU half runs in a process of its own, which
`test_kernels_equal_the_references_under_the_interpreter` starts on this very file.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from adacc_hf.kernels import bitmask, outlier_int4
from adacc_hf.kernels.codecs import Codec, get_codec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# The shapes have one element, one row, padded and full tiles, columns that are multiples of nothing, or no elements.
SHAPES = [(1, 1), (1, 100), (3, 63), (64, 256), (129, 70), (5, 700), (0, 8)]


@dataclass
class Pair:
    """A codec's kernels and its formulas, for one tensor."""

    codec: Codec
    x: Tensor

    @property
    def kernels(self) -> Any:
        return import_module(f"adacc_hf.kernels.{self.codec.triton}")

    def encode(self) -> tuple[Tensor, ...]:
        return self.codec.encode_by(self.kernels, self.x if self.codec.keeps_rows else self.x.view(-1))

    def decode(self, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        self.codec.decode_by(self.kernels, out if self.codec.keeps_rows else out.view(-1), tensors)

    def encode_ref(self) -> tuple[Tensor, ...]:
        if isinstance(self.codec, outlier_int4.OutlierInt4):
            indices = self.codec.outliers.indices if self.codec.outliers else None
            return outlier_int4.encode_ref(self.x, indices, self.codec.group_size)
        return self.codec.encode_traceable(self.x)

    def decode_ref(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.codec.decode_traceable(tensors, tuple(self.x.shape), self.x.dtype)


def _outlier(x: Tensor, count: int, group_size: int) -> Codec:
    codec = outlier_int4.OutlierInt4(group_size, count)
    if count:
        outliers = outlier_int4.choose_outliers(outlier_int4.channel_sums(x.cpu()), count, group_size, x.element_size())
        codec.outliers = replace(outliers, indices=outliers.indices.to(x.device), keep=outliers.keep.to(x.device))
    return codec


CASES: dict[str, Callable[[Tensor], Codec]] = {
    "outlier": lambda x: _outlier(x, 0, 64),
    "outlier-raw": lambda x: _outlier(x, min(3, x.shape[1]), 64),
    "outlier-raw-many": lambda x: _outlier(x, min(70, x.shape[1]), 64),
    "outlier-raw-g16": lambda x: _outlier(x, 1, 16),
    "channel": lambda x: get_codec("channel_int4"),
    "channel-g16": lambda x: get_codec("channel_int4", group_size=16),
    "token": lambda x: get_codec("token_int4"),
    "int8": lambda x: get_codec("int8"),
    "int8-g1024": lambda x: get_codec("int8", group_size=1024),
    "fp8": lambda x: get_codec("fp8"),
    "fp8-g16": lambda x: get_codec("fp8", group_size=16),
    "asymmetric": lambda x: get_codec("asymmetric_int4"),
    "asymmetric-g32": lambda x: get_codec("asymmetric_int4", group_size=32),
}


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor with channels of very different size, so that groups, channels and rows each have their own
    scale."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-12, 10, shape[-1:], generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def _poisoned(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan")) if x.is_floating_point() else torch.full_like(x, 77)


def _assert_equal(codec: Codec, x: Tensor) -> None:
    pair = Pair(codec, x)
    tensors, expected = pair.encode(), pair.encode_ref()
    for tensor, expected_tensor in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=0)
    out = _poisoned(x)
    pair.decode(out, tensors)
    torch.testing.assert_close(out, pair.decode_ref(expected), rtol=0, atol=0)


def _is_quick(case: str, shape: tuple[int, ...]) -> bool:
    """Return True if the interpreter is fast enough."""
    return not (INTERPRETED and case.startswith("asymmetric")) or math.prod(shape) < 10_000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("case", "shape"), [(c, s) for c in CASES for s in SHAPES if _is_quick(c, s)], ids=str)
def test_codes_scales_and_values_are_bit_equal(case, shape, dtype, device):
    x = _tensor(shape, dtype, device)
    _assert_equal(CASES[case](x), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 2112), (3, 2100), (2, 5003)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("outlier-raw")])
def test_outliers_of_rows_longer_than_a_tile_are_bit_equal(case, shape, dtype, device):
    """Programs begin in the middle of a row and touch at most two rows."""
    x = _tensor(shape, dtype, device)
    _assert_equal(CASES[case](x), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_extreme_values_are_bit_equal(case: str, dtype: torch.dtype, device: str) -> None:
    values = [0.0, 1e-40, -3e38, 65504.0, -1e-30, 3.3e38, -0.0, 2.0**-100]
    x = torch.tensor(values).repeat_interleave(64).view(4, 128)
    x[1] *= torch.linspace(-1, 1, 128)
    most = torch.finfo(dtype).max
    x = x.clamp(-most, most).to(dtype).to(device)
    _assert_equal(CASES[case](x), x)


# The interpreter calculates with numpy, which warns about arithmetic on infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_decodes_alike(case: str, dtype: torch.dtype, device: str) -> None:
    x = _tensor((130, 64), dtype, device)
    x[2, 3], x[70, 9], x[129, 63] = float("nan"), float("-inf"), float("inf")
    pair = Pair(CASES[case](x), x)
    out = _poisoned(x)
    pair.decode(out, pair.encode())
    expected = pair.decode_ref(pair.encode_ref())
    # NaN and the infinities may be decoded to any of them, and their codes are unspecified.
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert not out.isfinite()[[2, 70, 129], [3, 9, 63]].any()
    finite = expected.isfinite()
    torch.testing.assert_close(out[finite], expected[finite], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_rounds_midpoints_as_torch_casts(device: str) -> None:
    """The input has every number of E4M3 and every midpoint, with the float32 on both sides, next to a peak of 448."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    points = torch.cat([points, points.nextafter(torch.tensor(0.0)), points.nextafter(torch.tensor(448.0))])
    x = torch.full((2 * points.numel(), 16), 448.0)
    x[:, 3] = torch.cat([points, -points])
    codes, peaks = Pair(get_codec("fp8", group_size=16), x.to(device)).encode()
    assert bool((peaks == 448).all())
    assert torch.equal(codes.cpu(), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_longer_than_a_block_are_bit_equal(device: str) -> None:
    x = _tensor((5, 4500), torch.float32, device)
    _assert_equal(get_codec("token_int4"), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 9, 20_000])
@pytest.mark.parametrize("with_pattern", [False, True], ids=["boolean", "valued"])
def test_masks_are_bit_equal(with_pattern: bool, numel: int, dtype: torch.dtype, device: str) -> None:
    from adacc_hf.kernels import bitmask_triton

    x = torch.rand(numel, generator=torch.Generator().manual_seed(0)) > 0.5
    x = (x.to(dtype) * (-5 if with_pattern else 1)).to(device)
    expected = bitmask.encode_ref(x, with_pattern)
    packed, *pattern = map(torch.empty_like, expected)
    bitmask_triton.encode(x, packed, *pattern)
    assert torch.equal(packed, expected[0])
    if with_pattern and bool(x.any()):
        assert torch.equal(pattern[0], expected[1])
    out = _poisoned(x)
    bitmask_triton.decode(out, packed, *pattern)
    assert torch.equal(out, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_channel_sums_agree(dtype: torch.dtype, device: str) -> None:
    from adacc_hf.kernels import outlier_int4_triton

    x = _tensor((300, 200), dtype, device)
    expected = x.double().abs().sum(0).float()
    # A sum of 300 float32 terms in any order has at most 300 roundings of 2^-24.
    torch.testing.assert_close(outlier_int4_triton.channel_sums(x), expected, rtol=300 * 2**-24, atol=0)


if not INTERPRETED:

    @pytest.mark.timeout(900)  # all tests above, one program of a kernel after the other: a minute on an idle machine
    def test_kernels_equal_the_references_under_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
        assert " passed" in process.stdout
