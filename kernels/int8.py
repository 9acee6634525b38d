"""Symmetric group-wise INT8 over the flat tensor, for activations that INT4 would hurt."""

from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore
from adacc_hf.kernels.codecs import Codec, Payload, register

SCALE_FACTOR = 1 / 127


def encode_ref(x_AG: Tensor, rounding: str, seed: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [A, G] in -127..127 and 16-bit peaks [A]."""
    peaks_A = _int4.peaks_ref(x_AG, scale="max127")
    inverse_A = _int4.inverse_ref(peaks_A, SCALE_FACTOR)
    shifted = x_AG.float() * inverse_A[:, None] + _int4.round_offset(x_AG, rounding, seed)
    return shifted.floor().clamp(-127, 127).to(torch.int8), peaks_A


def decode_ref(codes_AG: Tensor, peaks_A: Tensor, dtype: torch.dtype) -> Tensor:
    """[A, G] from codes and peaks."""
    scale_A = peaks_A.float() * SCALE_FACTOR
    return (codes_AG.float() * scale_A[:, None]).to(dtype)


@register
class Int8(Codec):
    """Symmetric INT8 in groups, peak to 127."""

    name = "int8"

    def __init__(self, group_size: int = 64, rounding: str = "nearest", seed: int = 0) -> None:
        _int4.check_options(self.name, group_size, "max127", rounding, ("max127",))
        self.group_size = group_size
        self.rounding = rounding
        self.seed = seed

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _int4.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = -(-prod(shape) // self.group_size)
        return groups * (self.group_size + _int4.PEAK_BYTES)

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        flat = as_flat(tensor)
        groups = -(-flat.shape[0] // self.group_size)
        x_AG = _int4.pad_to(flat, groups * self.group_size).view(groups, self.group_size)
        tensors = encode_ref(x_AG, self.rounding, self.seed)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        codes, peaks = payload.tensors

        def fill(out_N: Tensor) -> None:
            out_N.copy_(decode_ref(codes, peaks, payload.dtype).view(-1)[: out_N.shape[0]])

        return restore(fill, payload.size, payload.stride, payload.dtype, codes.device)
