"""Asymmetric group-wise INT4 (paper 3.2, eq. 3) over the flat tensor, for the result of a softmax, before and after
dropout.

`scale="paper"` is eq. 3: offset (max + min) / 2 and scale (max - min) / 16, which clips the maximum by one step.
`scale="range15"`, the default, uses offset min and scale (max - min) / 15. Nothing is clipped, and the zeros of
causally masked softmax decode to exact zeros. Codes are 0..15, the paper's -8..7 shifted by 8.

Offsets are stored in the tensor's dtype, in which the minimum is exact. (max - min) / 2 is stored in bfloat16,
truncated towards zero so that decoding never exceeds the maximum. All arithmetic is on elements divided by 2, because
max - min may exceed float32.
"""

from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import even_groups
from adacc_hf.kernels.codecs import Codec, Kernels, register

# Factor from half the range to half the scale, and the code of the offset.
SCALE_FACTORS = {"range15": 1 / 15, "paper": 1 / 16}
OFFSET_CODES = {"range15": 0.0, "paper": 8.0}


def encode_ref(flat_N: Tensor, group_size: int, scale: str, rounding: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode with plain torch. Return packed codes uint8 [A/2, G], offsets [A] in the tensor's dtype, and (max - min) /
    2 of each group, bfloat16 [A].

    The N elements are cut into A groups of G = `group_size` elements. A is rounded up to an even number, because a byte
    holds two 4-bit codes. The groups are filled up with copies of the last element. Codes of non-finite elements are
    unspecified.
    """
    groups = even_groups(flat_N.shape[0], group_size)
    x_AG = _symmetric.pad_to(flat_N, groups * group_size, with_last=True).view(groups, group_size)
    offset = _symmetric.rounding_offset_ref(x_AG, OFFSET_CODES[scale], rounding, seed)
    packed = _symmetric.packed_ref(lambda x_AG, offset: _codes_ref(x_AG, scale, offset), x_AG, offset)
    codes, offsets, half_ranges = packed
    return codes, offsets, half_ranges


def _codes_ref(x_AG: Tensor, scale: str, offset: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Encode `x_AG` with plain torch operators. Return (codes before packing, offset of each group, (max - min) / 2 of
    each group)."""
    high_A, low_A = x_AG.amax(1).float(), x_AG.amin(1).float()
    half_ranges = _symmetric.cut_to_bfloat16(high_A * 0.5 - low_A * 0.5)
    offsets = (low_A if scale == "range15" else high_A * 0.5 + low_A * 0.5).to(x_AG.dtype)
    inverse_A = _symmetric.inverse_ref(half_ranges, SCALE_FACTORS[scale])
    shifted = (x_AG.float() * 0.5 - offsets.float()[:, None] * 0.5) * inverse_A[:, None] + offset
    return shifted.clamp(0, 15).to(torch.uint8), offsets, half_ranges


def decode_ref(numel: int, scale: str, codes: Tensor, offsets: Tensor, half_ranges: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return [N] elements, N = `numel`."""
    half_scale_A = half_ranges.float() * SCALE_FACTORS[scale]
    steps = _symmetric.unpack_ref(codes).float() - OFFSET_CODES[scale]
    x_AG = (steps * half_scale_A[:, None] + offsets.float()[:, None] * 0.5) * 2.0
    return x_AG.to(offsets.dtype).view(-1)[:numel]


@register
class AsymmetricInt4(Codec):
    """Codec asymmetric_int4: INT4 in groups, each with its own offset and scale."""

    name = "asymmetric_int4"
    suits = frozenset({"softmax"})
    triton = "asymmetric_int4_triton"
    cpu = Kernels(_cpu.encode_asymmetric, _cpu.decode_asymmetric)

    def __init__(self, group_size: int = 64, scale: str = "range15", rounding: str = "nearest", seed: int = 0) -> None:
        _symmetric.check_options(self.name, group_size, scale, rounding, seed, tuple(SCALE_FACTORS))
        self.group_size = group_size
        self.scale = scale
        self.rounding = rounding
        self.seed = seed
        self._formula = (SCALE_FACTORS[scale], OFFSET_CODES[scale])

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = even_groups(prod(shape), self.group_size)
        return groups * self.group_size // 2 + groups * (dtype.itemsize + _symmetric.PEAK_BYTES)

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        return kernels.encode(x, self.group_size, *self._formula, self.rounding, self.seed)

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors, *self._formula)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return encode_ref(tensor.reshape(-1), self.group_size, self.scale, self.rounding, self.seed)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(prod(size), self.scale, *tensors).view(size)
