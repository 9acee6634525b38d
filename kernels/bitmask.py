"""One bit per element, lossless: boolean masks, and masks of two values 0 and c such as dropout's 0 and 1/(1-p).

Bit j of byte k is element k + j * bytes of the flat tensor, so that packing joins eight contiguous eighths. Whether an
element is set is read from its bit pattern, so c may be negative, infinite or NaN (an additive attention mask); the
one pattern c is kept beside the bits.
"""

from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore
from adacc_hf.kernels.codecs import Codec, Payload, register

PATTERN_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float64,
    *_int4.FLOAT_DTYPES,
)


def encode_ref(x_N: Tensor) -> tuple[Tensor, ...]:
    """Bits uint8 [N/8], and unless x is boolean the pattern [1] of the value that set elements have. N is 8 * bytes."""
    bits_8N = (x_N != 0).view(torch.uint8).view(8, -1)
    packed = bits_8N[0].clone()
    for j in range(1, 8):
        packed = packed | (bits_8N[j] << j)
    if x_N.dtype == torch.uint8:  # a boolean tensor's bytes: the value is known
        return (packed,)
    # All elements are 0 or c: whichever sign c's pattern has, c is the maximum, the minimum or both.
    pattern = x_N.amax(0, keepdim=True) | x_N.amin(0, keepdim=True) if x_N.numel() else x_N.new_zeros(1)
    return packed, pattern


def decode_ref(packed: Tensor, *pattern: Tensor) -> Tensor:
    """[8 * bytes] patterns: uint8 0 and 1 where no pattern is given."""
    bits = torch.stack([(packed >> j) & 1 for j in range(8)]).view(-1)
    return bits.to(pattern[0].dtype) * pattern[0] if pattern else bits


@register
class Bitmask(Codec):
    """1 bit per element and the set elements' value. Lossless on what `accepts` lets through."""

    name = "bitmask"
    lossless = True

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    @torch.no_grad()
    def accepts(self, tensor: Tensor) -> bool:
        """Whether there are at most two distinct values, one of them 0. Synchronises. -0.0 is not 0."""
        if not self.supports(tuple(tensor.shape), tensor.dtype):
            return False
        if tensor.dtype == torch.bool or tensor.numel() == 0:
            return True
        patterns = _patterns(tensor)
        high, low = patterns.amax(), patterns.amin()
        return bool(((patterns == 0) | (patterns == torch.where(high == 0, low, high))).all())

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return -(-prod(shape) // 8) + (0 if dtype == torch.bool else dtype.itemsize)

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        patterns = _patterns(tensor)
        num_bytes = -(-patterns.shape[0] // 8)
        tensors = encode_ref(_int4.pad_to(patterns, 8 * num_bytes))
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        def fill(out_N: Tensor) -> None:
            out_N.copy_(decode_ref(*payload.tensors)[: out_N.shape[0]].view(payload.dtype))

        device = payload.tensors[0].device
        return restore(fill, payload.size, payload.stride, payload.dtype, device)


def _patterns(tensor: Tensor) -> Tensor:
    """[N] bit patterns as integers: uint8 for booleans, else signed integers (int8 included) of the same width."""
    flat = as_flat(tensor)
    if tensor.dtype == torch.bool:
        return flat.view(torch.uint8)
    return flat.view(torch.int8 if tensor.element_size() == 1 else PATTERN_DTYPES[tensor.element_size()])
