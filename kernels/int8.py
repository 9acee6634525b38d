"""Symmetric group-wise INT8 over the flat tensor, for activations for which INT4 is too coarse."""

from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels.codecs import Codec, Kernels, register

BITS = 8
FACTOR = 1 / 127


def encode_ref(flat_N: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Encode a tensor in groups with plain torch. Return (codes, peaks).

    The N elements are cut into A groups of G = `group_size` elements, the last one filled up with zeros. Codes are
    uint8 [A, G], and the code of zero is 128. Peaks are absolute values, [A] in a 16-bit dtype.
    """
    groups = -(-flat_N.shape[0] // group_size)
    x_AG = _symmetric.pad_to(flat_N, groups * group_size).view(groups, group_size)
    return _symmetric.encode_ref(x_AG, BITS, FACTOR)


def decode_ref(numel: int, dtype: torch.dtype, codes: Tensor, peaks: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return [N] elements in `dtype`, N = `numel`."""
    return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype).view(-1)[:numel]


def _encode_cpu(flat_N: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    return _cpu.encode_groups(flat_N, group_size, BITS, FACTOR)


def _decode_cpu(out_N: Tensor, codes: Tensor, peaks: Tensor) -> None:
    _cpu.decode_groups(out_N, codes, peaks, BITS, FACTOR)


@register
class Int8(Codec):
    """Codec int8: symmetric INT8 in groups. The absmax (largest absolute value) of each group is scaled to 127."""

    name = "int8"
    # A block input reaches every gradient of its block, so it gets 8 bits.
    suits = frozenset({"input"})
    stands_in = True
    triton = "int8_triton"
    cpu = Kernels(_encode_cpu, _decode_cpu)

    def __init__(self, group_size: int = 64) -> None:
        _symmetric.check_group_size(self.name, group_size)
        self.group_size = group_size

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = -(-prod(shape) // self.group_size)
        return groups * (self.group_size + _symmetric.PEAK_BYTES)

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        return kernels.encode(x, self.group_size)

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return encode_ref(tensor.reshape(-1), self.group_size)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(prod(size), dtype, *tensors).view(size)
