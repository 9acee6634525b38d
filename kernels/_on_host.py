"""Codecs that store payloads in host memory: `host`, which stores a tensor unencoded, and `<codec>+host` for each
codec.

`<codec>+host` stores the payload of that codec. The payload is copied to the pool of pinned memory (`_host_pool.py`) on
the stream that encodes, and copied back on the stream that decodes. Copies do not overlap with kernels of the same
stream. If the pool has no room, the payload stays on the device, and decoding gives the same result.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import cast

import torch
from torch import Tensor

from adacc_hf.kernels._host_payloads import HOST, encoding_of
from adacc_hf.kernels._host_pool import HostBlock, host_pool
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, without_gradients


@dataclass(frozen=True, slots=True)
class HostPayload(Payload):
    """Payload (encoded tensor) that is stored in host memory."""

    block: HostBlock
    device: torch.device
    """Device of the encoded tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors, without the rounding of the pool."""
        return sum(tensor.nbytes for tensor in self.tensors)


class OnHost(Codec):
    """Mixin for a codec class that moves the payload to host memory after encoding, and back before decoding."""

    @without_gradients
    def encode(self, tensor: Tensor) -> Payload:
        payload = super().encode(tensor)
        block = host_pool.store(payload.tensors)
        layout = (payload.dtype, payload.size)
        if block is None:
            return Payload(self._own(payload), *layout)
        return HostPayload(block.tensors, *layout, block=block, device=payload.tensors[0].device)

    @without_gradients
    def decode(self, payload: Payload) -> Tensor:
        if isinstance(payload, HostPayload):
            tensors = host_pool.load(payload.block, payload.device)
        else:
            tensors = self._own(payload)
        return super().decode(Payload(tensors, payload.dtype, payload.size))

    def _own(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the tensors of `payload`, in memory that no other tensor shares. The payload of the codec `Unencoded`
        may be a view of the original tensor, and is therefore copied. Other payloads are not copied."""
        return tuple(part.clone() for part in payload.tensors) if isinstance(self, Unencoded) else payload.tensors


class Unencoded(Codec):
    """Codec that stores the elements of a tensor unencoded. The payload is a view of the tensor, and `decode` returns a
    view of the payload. Therefore only `OnHost`, which copies the payload, uses this codec."""

    name = HOST
    lossless = True

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return True

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return prod(shape) * dtype.itemsize

    @without_gradients
    def encode(self, tensor: Tensor) -> Payload:
        return Payload((tensor.view(-1),), tensor.dtype, tuple(tensor.shape))

    @without_gradients
    def decode(self, payload: Payload) -> Tensor:
        (flat_N,) = payload.tensors
        return flat_N.view(payload.size)


@cache
def host_codec(name: str) -> type[Codec]:
    """Return the class of the codec `name`, which stores payloads in host memory. Raises ValueError for an unknown
    codec."""
    codec_class = Unencoded if name == HOST else codec_type(encoding_of(name))
    attributes = {"name": name, "__doc__": f"Codec {name}: the payload of {codec_class.__name__} in host memory."}
    return cast(type[Codec], type(f"{codec_class.__name__}OnHost", (OnHost, codec_class), attributes))
