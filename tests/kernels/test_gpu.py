"""Codecs on a CUDA device: no synchronisation, one launch each way, and the same bits as the CPU. Run with `pytest -m
gpu`."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from adacc_hf.kernels.codecs import Codec, get_codec

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Raise an error if the device is synchronised in the body."""
    torch.cuda.synchronize()
    debug_mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(debug_mode)


def _activation(dtype: torch.dtype, shape: tuple[int, ...] = (2, 256, 768)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _launches(run: Callable[[], object]) -> int:
    """Return the kernels, fills and copies that `run` launches on the device after a warm-up."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:  # torch 2.11 warns without it
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())


def test_neither_encode_nor_decode_synchronises(lossy, dtype, request):
    x = _activation(dtype).cuda()
    lossy.decode(lossy.encode(x))  # the first call compiles the kernels, which synchronises
    request.getfixturevalue("no_synchronisation")
    lossy.fit(x)
    lossy.decode(lossy.encode(x))


def test_bitmask_does_not_synchronise(request: pytest.FixtureRequest) -> None:
    mask = (_activation(torch.float32) > 0).cuda()
    codec = get_codec("bitmask")
    codec.decode(codec.encode(mask))
    request.getfixturevalue("no_synchronisation")
    codec.decode(codec.encode(mask))


def test_one_launch_encodes_and_one_decodes(lossy: Codec, dtype: torch.dtype) -> None:
    x = _activation(dtype).cuda()
    payload = lossy.encode(x)
    assert _launches(lambda: lossy.encode(x)) == 1
    assert _launches(lambda: lossy.decode(payload)) == 1


def test_payloads_and_values_equal_those_of_the_cpu(lossy: Codec, dtype: torch.dtype) -> None:
    x = _activation(dtype)
    on_cpu = get_codec(lossy.name, **lossy.options)
    lossy.fit(x.cuda())
    on_cpu.fit(x)
    payload, expected = lossy.encode(x.cuda()), on_cpu.encode(x)
    for tensor, expected_tensor in zip(payload.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(tensor.cpu(), expected_tensor, rtol=0, atol=0)
    torch.testing.assert_close(lossy.decode(payload).cpu(), on_cpu.decode(expected), rtol=0, atol=0)


def test_shapes_are_restored_on_the_device(lossy: Codec, part: Callable[[Tensor], Tensor]) -> None:
    x = part(_activation(torch.bfloat16, (2, 3, 70, 4)).cuda())
    payload = lossy.encode(x)
    restored = lossy.decode(payload)
    assert restored.shape == x.shape
    assert payload.nbytes == lossy.predicted_bytes(tuple(x.shape), x.dtype)
