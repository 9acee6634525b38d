"""Asymmetric group-wise INT4 (paper 3.2, eq. 3) over the flat tensor, for the result of a softmax, before and after
dropout.

The offset is min and the scale (max - min) / 15. In contrast to eq. 3, whose offset is (max + min) / 2 and whose scale
is (max - min) / 16, nothing is clipped, and the zeros of causally masked softmax decode to exact zeros.

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

FACTOR = 1 / 15  # from half the range to half the scale


def encode_ref(flat_N: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode with plain torch. Return packed codes uint8 [A/2, G], offsets [A] in the tensor's dtype, and (max - min) /
    2 of each group, bfloat16 [A].

    The N elements are cut into A groups of G = `group_size` elements. A is rounded up to an even number, because a byte
    holds two 4-bit codes. The groups are filled up with copies of the last element. Codes of non-finite elements are
    unspecified.
    """
    groups = even_groups(flat_N.shape[0], group_size)
    x_AG = _symmetric.pad_to(flat_N, groups * group_size, with_last=True).view(groups, group_size)
    codes, offsets, half_ranges = _symmetric.packed_ref(_codes_ref, x_AG)
    return codes, offsets, half_ranges


def _codes_ref(x_AG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode `x_AG` with plain torch operators. Return (codes before packing, offset of each group, (max - min) / 2 of
    each group)."""
    high_A, low_A = x_AG.amax(1).float(), x_AG.amin(1).float()
    half_ranges = _symmetric.cut_to_bfloat16(high_A * 0.5 - low_A * 0.5)
    inverse_A = _symmetric.inverse_ref(half_ranges, FACTOR)
    shifted = (x_AG.float() * 0.5 - low_A[:, None] * 0.5) * inverse_A[:, None] + 0.5
    return shifted.clamp(0, 15).to(torch.uint8), low_A.to(x_AG.dtype), half_ranges


def decode_ref(numel: int, codes: Tensor, offsets: Tensor, half_ranges: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return [N] elements, N = `numel`."""
    half_scale_A = half_ranges.float() * FACTOR
    x_AG = (_symmetric.unpack_ref(codes).float() * half_scale_A[:, None] + offsets.float()[:, None] * 0.5) * 2.0
    return x_AG.to(offsets.dtype).view(-1)[:numel]


@register
class AsymmetricInt4(Codec):
    """Codec asymmetric_int4: INT4 in groups, each with its own offset and scale."""

    name = "asymmetric_int4"
    suits = frozenset({"softmax"})
    triton = "asymmetric_int4_triton"
    cpu = Kernels(_cpu.encode_asymmetric, _cpu.decode_asymmetric)

    def __init__(self, group_size: int = 64) -> None:
        _symmetric.check_group_size(self.name, group_size)
        self.group_size = group_size

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = even_groups(prod(shape), self.group_size)
        return groups * self.group_size // 2 + groups * (dtype.itemsize + _symmetric.PEAK_BYTES)

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        return kernels.encode(x, self.group_size, FACTOR)

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors, FACTOR)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return encode_ref(tensor.reshape(-1), self.group_size)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(prod(size), *tensors).view(size)
