"""Codec with one bit per element, lossless: for boolean masks, and masks of two values 0 and c such as dropout's 0 and
1/(1-p).

Bit j of byte k is element k + j * (number of bytes) of the flat tensor, so packing joins eight contiguous eighths. An
element is set if its bit pattern is not 0, so c may be negative, infinite or NaN (an additive attention mask). The bit
pattern of c is stored with the bits.
"""

from functools import partial
from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels.codecs import MASK, Codec, Kernels, Layout, register

# Integer dtypes by element width. The patterns of bool, with width 1, are 0 and 1.
PATTERN_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (*(torch.bool, torch.uint8, torch.float64), *PATTERN_DTYPES.values(), *_symmetric.FLOAT_DTYPES)


def encode_ref(patterns_N: Tensor, with_pattern: bool) -> tuple[Tensor, ...]:
    """Return one bit per element of `patterns_N`, packed into uint8 [ceil(N / 8)]. A bit is 1 for a nonzero element. If
    `with_pattern`, also return the bit pattern of the nonzero elements, which are all equal, as a tensor of shape [1].
    The pattern is 0 if all elements are 0."""
    num_bytes = -(-patterns_N.shape[0] // 8)
    padded = _symmetric.pad_to(patterns_N, 8 * num_bytes)
    # int32, because code compiled for a CPU takes 14 ms for 2**20 bytes or booleans, and 0.1 ms for int32.
    bits = (padded != 0).view(8, num_bytes).to(torch.int32)
    joined = bits[0]
    for j in range(1, 8):
        joined = joined + bits[j] * (1 << j)
    packed = joined.to(torch.uint8)
    if not with_pattern:
        return (packed,)
    # All elements are 0 or c, so c is the maximum or the minimum, or both.
    edges = torch.cat([padded, padded.new_zeros(1)])
    return packed, edges.amax(0, keepdim=True) | edges.amin(0, keepdim=True)


def decode_ref(numel: int, packed: Tensor, *pattern: Tensor) -> Tensor:
    """Decode packed bits to N = `numel` elements: 0 where the bit is 0, `pattern` where the bit is 1. If no pattern is
    passed, return uint8 zeros and ones."""
    bits = torch.cat([(packed >> j) & 1 for j in range(8)])[:numel]
    return bits.to(pattern[0].dtype) * pattern[0] if pattern else bits


@register
class Bitmask(Codec):
    """Codec bitmask: 1 bit per element, and the one value that all nonzero elements share. The codec is lossless for
    tensors for which `accepts` returns True."""

    name = "bitmask"
    lossless = True
    suits = frozenset({MASK})
    triton = "bitmask_triton"
    cpu = Kernels(partial(_cpu.run_bits, "pack"), partial(_cpu.run_bits, "unpack"))

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    @torch.no_grad()
    def accepts(self, tensor: Tensor) -> bool:
        """Return True if all nonzero elements of `tensor` have the same bit pattern. -0.0 counts as nonzero. The test
        synchronises with the device."""
        if not self.supports(tuple(tensor.shape), tensor.dtype):
            return False
        if tensor.dtype == torch.bool or tensor.numel() == 0:
            return True
        patterns = _bit_patterns(tensor.view(-1))
        high, low = patterns.amax(), patterns.amin()
        return bool(((patterns == 0) | (patterns == torch.where(high == 0, low, high))).all())

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        packed = (-(-prod(shape) // 8),), torch.uint8
        return (packed,) if dtype == torch.bool else (packed, ((1,), PATTERN_DTYPES[dtype.itemsize]))

    def encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        tensors = self._new_tensors(x)
        kernels.encode(_bit_patterns(x), *tensors)
        return tensors

    def decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(_bit_patterns(out), *tensors)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if tensor.dtype == torch.bool:
            return encode_ref(_mask_in_memory(tensor), with_pattern=False)
        return encode_ref(tensor.reshape(-1).view(PATTERN_DTYPES[tensor.element_size()]), with_pattern=True)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        patterns_N = decode_ref(prod(size), *tensors)
        # A comparison, because Inductor's C++ code for bytes viewed as booleans in arithmetic does not compile.
        return (patterns_N != 0 if dtype == torch.bool else patterns_N.view(dtype)).view(size)


def _mask_in_memory(tensor: Tensor) -> Tensor:
    """Return the elements of a mask as [N]. In a compiled graph for a GPU, force Inductor to write the mask to memory
    before packing. A byte is packed from eight distant elements. If the mask were not in memory, Inductor would
    recompute the mask while packing, and would store the four-byte random numbers from which the mask is computed. A
    compiled graph for a CPU recomputes the mask, because writing bytes is slow there."""
    if tensor.device.type == "cpu" or not tensor.is_contiguous():
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _bit_patterns(flat_N: Tensor) -> Tensor:
    """Return the bit patterns of the elements, [N]: a view as signed integers of the same width."""
    return flat_N.view(PATTERN_DTYPES[flat_N.element_size()])
