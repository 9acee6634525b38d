"""The compiled CPU code is bit-equal to the references."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from codec_cases import LOSSY, spread
from torch import Tensor

from adacc_hf.kernels import _cpu
from adacc_hf.kernels.codecs import Codec, Payload, get_codec

SHAPES = ((1,), (37, 70), (128, 256), (3, 5, 7), (300, 3), (5, 3000), (0, 4))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use an empty cache folder, with no library loaded before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _cpu.library.cache_clear()
    yield tmp_path
    _cpu.library.cache_clear()


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-20, 10, shape[-1:], generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def _reference(codec: Codec, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Payload, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(_cpu, "library", lambda: None)
        payload = codec.encode(x)
        return payload, codec.decode(payload)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("lossy", "shape", "dtype"), spread(LOSSY, SHAPES, _cpu.DTYPES), indirect=["lossy"], ids=str)
def test_compiled_codecs_equal_the_references_bit_for_bit(lossy, shape, dtype, monkeypatch):
    assert _cpu.library() is not None, "these tests need a C++ compiler"
    x = _tensor(shape, dtype)
    payload = lossy.encode(x)
    expected, restored = _reference(lossy, x, monkeypatch)
    for tensor, expected_tensor in zip(payload.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=0)
    torch.testing.assert_close(lossy.decode(payload), restored, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_compiled_bitmask_equals_the_reference(shape, dtype, monkeypatch):
    x = torch.where(_tensor(shape, torch.float32) > 0, -3, 0).to(dtype)
    codec = get_codec("bitmask")
    expected, restored = _reference(codec, x, monkeypatch)
    payload = codec.encode(x)
    for tensor, expected_tensor in zip(payload.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor, expected_tensor)
    assert torch.equal(codec.decode(payload), restored)


def test_any_number_of_threads_gives_the_same_bits(lossy: Codec) -> None:
    x = _tensor((1024, 512), torch.float32)  # 2 MiB, enough for several threads
    num_threads = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(lossy.encode(x).tensors)
    finally:
        torch.set_num_threads(num_threads)
    for tensors in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], tensors, strict=True))


def test_a_missing_compiler_is_logged_once(unbuilt, monkeypatch, caplog):
    monkeypatch.setenv("CXX", str(unbuilt / "no-such-compiler"))
    with caplog.at_level(logging.WARNING):
        assert _cpu.library() is None
        assert _cpu.library() is None
    assert len(caplog.records) == 1
    assert "codecs run as plain torch on the CPU" in caplog.text
    assert "no-such-compiler" in caplog.text


def test_a_failing_compiler_is_logged_with_what_it_said(unbuilt, monkeypatch, caplog):
    broken = unbuilt / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of order >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert _cpu.library() is None
    assert "out of order" in caplog.text
    assert not list(unbuilt.rglob("*.so"))
