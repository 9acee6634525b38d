"""Symmetric group-wise INT8 over the flat tensor, for activations for which INT4 is too coarse."""

from functools import partial
from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import peak_dtype
from adacc_hf.kernels.codecs import GroupCodec, Kernels, Layout, register

BITS = 8
FACTOR = 1 / 127


@register
class Int8(GroupCodec):
    """Codec int8: symmetric INT8 in groups. The absmax (largest absolute value) of each group is scaled to 127."""

    name = "int8"
    # A block input reaches every gradient of its block, so it gets 8 bits.
    suits = frozenset({"input"})
    triton = "int8_triton"
    cpu = Kernels(
        partial(_cpu.encode_groups, bits=BITS, factor=FACTOR), partial(_cpu.decode_groups, bits=BITS, factor=FACTOR)
    )

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        groups = -(-prod(shape) // self.group_size)
        return ((groups, self.group_size), torch.uint8), ((groups,), peak_dtype(dtype))

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return (codes, peaks).

        The N elements are cut into A groups of G = `group_size` elements, the last one filled up with zeros. Codes are
        uint8 [A, G], and the code of zero is 128. Peaks are absolute values, [A] in a 16-bit dtype.
        """
        groups = -(-tensor.numel() // self.group_size)
        x_AG = _symmetric.pad_to(tensor.reshape(-1), groups * self.group_size).view(groups, self.group_size)
        return _symmetric.encode_ref(x_AG, BITS, FACTOR)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes, peaks = tensors
        return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype).view(-1)[: prod(size)].view(size)
