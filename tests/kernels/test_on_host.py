"""Codecs in host memory: `host` restores every bit, and other codecs decode as they do on the device."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from codec_cases import DTYPES, LOSSY, PARTS, spread
from torch import Tensor

from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.kernels.codecs import codec_type, get_codec, list_codecs

EVERY_DTYPE = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.int64),
    *(torch.complex64, torch.float8_e4m3fn),
)
SHAPE = (2, 3, 70, 4)


class User:
    """Object that reserves memory in the pool."""


@pytest.fixture(autouse=True)
def user() -> Iterator[User]:
    reserving = User()
    host_pool.reserve(reserving, 1 << 20)
    yield reserving
    host_pool.release(reserving)
    assert host_pool.nbytes == 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _noise(dtype: torch.dtype) -> Tensor:
    """Return random bits as numbers of `dtype`, NaN and infinity included."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (*SHAPE[:-1], SHAPE[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (bits > 127) if dtype == torch.bool else bits.view(dtype)


@pytest.mark.parametrize("every_dtype", EVERY_DTYPE)
def test_host_restores_every_bit_of_every_shape(every_dtype: torch.dtype, part: Callable[[Tensor], Tensor]) -> None:
    codec, x = get_codec("host"), part(_noise(every_dtype))
    payload = codec.encode(x)
    assert payload.nbytes == codec.predicted_bytes(tuple(x.shape), every_dtype)
    restored = codec.decode(payload)
    assert (restored.dtype, restored.shape, restored.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(_bits(restored), _bits(x))


def test_host_is_lossless_and_takes_no_options() -> None:
    codec = get_codec("host")
    assert codec.lossless
    assert codec.options == {}
    with pytest.raises(ValueError, match="codec 'host' has no option 'seed'"):
        get_codec("host", seed=1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("lossy", "dtype", "part"), spread(LOSSY, DTYPES, PARTS)[1::3], indirect=True)
def test_a_codec_in_host_memory_decodes_as_on_the_device(lossy, dtype, part):
    x = part((torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 3).to(dtype))
    moved = get_codec(f"{lossy.name}+host", **json.loads(json.dumps(lossy.options)))
    lossy.fit(x)
    moved.fit(x)
    payload = moved.encode(x)
    assert payload.nbytes == moved.predicted_bytes(tuple(x.shape), dtype)
    expected, restored = lossy.decode(lossy.encode(x)), moved.decode(payload)
    assert torch.equal(_bits(restored), _bits(expected))
    assert (moved.name, moved.options, moved.lossless) == (f"{lossy.name}+host", lossy.options, False)


@pytest.mark.parametrize("name", list_codecs())
def test_a_codec_in_host_memory_declares_what_the_codec_does(name: str) -> None:
    moved, on_device = codec_type(f"{name}+host"), codec_type(name)
    assert moved is codec_type(f"{name}+host")
    assert issubclass(moved, on_device)
    assert (moved.lossless, moved.keeps_outliers, moved.option_names()) == (
        *(on_device.lossless, on_device.keeps_outliers, on_device.option_names()),
    )


@pytest.mark.parametrize("name", ["host", "int8+host"])
def test_a_payload_does_not_change_with_its_tensor(name: str) -> None:
    codec, x = get_codec(name), torch.randn(SHAPE)
    payload = codec.encode(x)
    before = codec.decode(payload)
    x.zero_()
    assert torch.equal(codec.decode(payload), before)
    codec.decode(payload).zero_()
    assert torch.equal(codec.decode(payload), before)


@pytest.mark.parametrize("name", ["host", "int8+host"])
def test_without_room_the_payload_stays_on_the_device(name: str, user: User, caplog: pytest.LogCaptureFixture) -> None:
    host_pool.release(user)
    host_pool.reserve(user, 4096)
    codec, x = get_codec(name), torch.randn(SHAPE)
    expected = codec.decode(codec.encode(x[0, 0, 0]))
    payloads = [codec.encode(x) for _ in range(3)]
    assert host_pool.live_bytes <= 4096
    messages = [record.getMessage() for record in caplog.records]
    assert sum("has no room for" in message for message in messages) == 1, "the warning is logged once"
    before = codec.decode(payloads[-1])
    assert torch.equal(before[0, 0, 0], expected) == (name == "host")
    x.zero_()
    codec.decode(payloads[-1]).zero_()
    assert torch.equal(codec.decode(payloads[-1]), before)
