"""Asymmetric group-wise INT4 (paper 3.2, eq. 3) over the flat tensor, for the result of a softmax, before and after
dropout.

The offset is min and the scale (max - min) / 15. In contrast to eq. 3, whose offset is (max + min) / 2 and whose scale
is (max - min) / 16, nothing is clipped, and the zeros of causally masked softmax decode to exact zeros.

Offsets are stored in the tensor's dtype, in which the minimum is exact. (max - min) / 2 is stored in bfloat16,
truncated towards zero so that decoding never exceeds the maximum. All arithmetic is on elements divided by 2, because
max - min may exceed float32.
"""

from functools import partial
from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import even_groups
from adacc_hf.kernels.codecs import GroupCodec, Kernels, Layout, register

FACTOR = 1 / 15  # from half the range to half the scale


def _codes_ref(x_AG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode `x_AG` with plain torch operators. Return (codes before packing, offset of each group, (max - min) / 2 of
    each group)."""
    high_A, low_A = x_AG.amax(1).float(), x_AG.amin(1).float()
    half_ranges = _symmetric.cut_to_bfloat16(high_A * 0.5 - low_A * 0.5)
    inverse_A = _symmetric.inverse_ref(half_ranges, FACTOR)
    shifted = (x_AG.float() * 0.5 - low_A[:, None] * 0.5) * inverse_A[:, None] + 0.5
    return shifted.clamp(0, 15).to(torch.uint8), low_A.to(x_AG.dtype), half_ranges


@register
class AsymmetricInt4(GroupCodec):
    """Codec asymmetric_int4: INT4 in groups, each with its own offset and scale."""

    name = "asymmetric_int4"
    suits = frozenset({"softmax"})
    triton = "asymmetric_int4_triton"
    cpu = Kernels(*(partial(_cpu.run_asymmetric, step, factor=FACTOR) for step in ("encode", "decode")))

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        groups = even_groups(prod(shape), self.group_size)
        codes = (groups // 2, self.group_size), torch.uint8
        return codes, ((groups,), dtype), ((groups,), torch.bfloat16)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return packed codes uint8 [A/2, G], offsets [A] in the tensor's dtype, and (max - min) / 2 of each group,
        bfloat16 [A].

        The N elements are cut into A groups of G = `group_size` elements. A is rounded up to an even number, because a
        byte holds two 4-bit codes. The groups are filled up with copies of the last element. Codes of non-finite
        elements are unspecified.
        """
        groups = even_groups(tensor.numel(), self.group_size)
        flat_N = _symmetric.pad_to(tensor.reshape(-1), groups * self.group_size, with_last=True)
        return _symmetric.packed_ref(_codes_ref, flat_N.view(groups, self.group_size))

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes, offsets, half_ranges = tensors
        half_scale_A = half_ranges.float() * FACTOR
        x_AG = (_symmetric.unpack_ref(codes).float() * half_scale_A[:, None] + offsets.float()[:, None] * 0.5) * 2.0
        return x_AG.to(dtype).view(-1)[: prod(size)].view(size)
