"""Codecs on the emulated device, run by their CPU code, which gives the same bits.

Triton's interpreter takes a thousand times as long. With EMULATED_CUDA_TRITON=1 the Triton kernels run instead.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adacc_hf.kernels import codecs, outlier_int4


def register() -> None:
    """Make every codec view the device's tensors as CPU tensors on the same memory."""
    for name in codecs.list_codecs():
        codec_class = type(codecs.get_codec(name))
        codec_class.fit = _lent_to(codec_class.fit)
        codec_class.encode = _encoder(codec_class.encode)
        codec_class.decode = _decoder(codec_class.decode)
    outlier_int4.channel_sums = _lent_to(outlier_int4.channel_sums)


def _lent_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its last argument, a tensor, and its result may be on the device."""

    def wrapped(*args: Any) -> Any:
        if not args[-1].is_cuda:
            return function(*args)
        result = function(*args[:-1], _lent(args[-1]))
        return None if result is None else _given(result)

    return wrapped


def _encoder(encode: Callable[..., codecs.Payload]) -> Callable[..., codecs.Payload]:
    def encoded(self: codecs.Codec, tensor: Tensor) -> codecs.Payload:
        if not tensor.is_cuda:
            return encode(self, tensor)
        payload = encode(self, _lent(tensor))
        return replace(payload, tensors=tuple(map(_given, payload.tensors)))

    return encoded


def _decoder(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decoded(self: codecs.Codec, payload: codecs.Payload) -> Tensor:
        if not payload.tensors[0].is_cuda:
            return decode(self, payload)
        return _given(decode(self, replace(payload, tensors=tuple(map(_lent, payload.tensors)))))

    return decoded


def _lent(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.lent_to_cpu(tensor)


def _given(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.given_to_device(tensor)
