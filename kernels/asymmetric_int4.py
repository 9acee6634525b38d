"""Asymmetric group-wise INT4 (paper 3.2, eq. 3) over the flat tensor, for softmax and score.

`scale="paper"` is eq. 3: offset (max + min) / 2 and scale (max - min) / 16, which clips the maximum by one step.
`scale="range15"`, the default, has offset min and scale (max - min) / 15: nothing is clipped, and the zeros that causal
masking puts into softmax decode to exact zeros. Codes are 0..15 with the paper's -8..7 moved up by 8.

Offsets are kept in the tensor's own dtype, in which the minimum is exact; scales in 16 bits, cut towards zero. The
stored scale is (max - min) / 2, since the whole range may exceed what the dtype can hold.
"""

from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore
from adacc_hf.kernels.codecs import Codec, Payload, register

# Factor from half the range to the scale, and the code that the offset stands for.
SCALE_FACTORS = {"range15": 2 / 15, "paper": 1 / 8}
OFFSET_CODES = {"range15": 0.0, "paper": 8.0}


def encode_ref(x_AG: Tensor, scale: str, rounding: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [A/2, G], offsets [A] in x's dtype, halves of the range [A] in 16 bits. A is even."""
    high_A, low_A = x_AG.amax(1).float(), x_AG.amin(1).float()
    half_range_A = _int4.store_peak(high_A * 0.5 - low_A * 0.5, x_AG.dtype)
    offset_A = (low_A if scale == "range15" else high_A * 0.5 + low_A * 0.5).to(x_AG.dtype)
    inverse_A = _int4.inverse_ref(half_range_A, SCALE_FACTORS[scale])
    centred = (x_AG.float() - offset_A.float()[:, None]) * inverse_A[:, None]
    shifted = centred + (_int4.round_offset(x_AG, rounding, seed) + OFFSET_CODES[scale])
    return _int4.pack_ref(shifted.clamp(0, 15).to(torch.uint8)), offset_A, half_range_A


def decode_ref(codes: Tensor, offset_A: Tensor, half_range_A: Tensor, scale: str) -> Tensor:
    """[A, G] from codes, offsets and half ranges."""
    scale_A = half_range_A.float() * SCALE_FACTORS[scale]
    steps = _int4.unpack_ref(codes).float() - OFFSET_CODES[scale]
    return (steps * scale_A[:, None] + offset_A.float()[:, None]).to(offset_A.dtype)


@register
class AsymmetricInt4(Codec):
    """INT4 in groups with an offset and a scale each."""

    name = "asymmetric_int4"

    def __init__(self, group_size: int = 64, scale: str = "range15", rounding: str = "nearest", seed: int = 0) -> None:
        _int4.check_options(self.name, group_size, scale, rounding, tuple(SCALE_FACTORS))
        self.group_size = group_size
        self.scale = scale
        self.rounding = rounding
        self.seed = seed

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _int4.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = _int4.even_groups(prod(shape), self.group_size)
        return groups * (self.group_size // 2 + dtype.itemsize + _int4.PEAK_BYTES)

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        flat = as_flat(tensor)
        groups = _int4.even_groups(flat.shape[0], self.group_size)
        x_AG = _int4.pad_to(flat, groups * self.group_size, with_last=True).view(groups, self.group_size)
        tensors = encode_ref(x_AG, self.scale, self.rounding, self.seed)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        codes, offsets, half_ranges = payload.tensors

        def fill(out_N: Tensor) -> None:
            out_N.copy_(decode_ref(codes, offsets, half_ranges, self.scale).view(-1)[: out_N.shape[0]])

        return restore(fill, payload.size, payload.stride, payload.dtype, codes.device)
