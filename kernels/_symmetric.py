"""Formulas of the symmetric codecs, and their references in plain torch.

Shapes: a tensor is seen as x_AGB, A groups of G elements in each of B columns, with one peak per [A, B]. Group-wise
codecs have B = 1, token_int4 has one row per group, channel_int4 has B = channels.

A group is stored as a peak and one code per element. The peak is the group's element with the largest absolute value,
and has no relation to peak memory. A code is the element divided by the scale, rounded, and shifted to be non-negative:
4-bit codes are 0..15 with 8 for zero, 8-bit codes 1..255 with 128 for zero. A byte holds the 4-bit codes of group a
(low) and group a + A/2 (high), with A padded to an even number. Packing therefore joins two contiguous halves and never
shuffles neighbours.

Peaks are stored in a 16-bit dtype. The peak of float16 or bfloat16 elements is stored exactly, in the elements' dtype.
The peak of float32 elements is truncated towards zero to bfloat16, which has the same range (up to 3e38). No decoded
element exceeds the original peak, so nothing overflows. Codes are computed from the stored peak. The truncation clips
the top 2^-7 of the range.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # powers of two for Triton; below 16 the peaks outweigh the codes
SIGNED_FACTOR = -1 / 8  # from peak to scale: the scale has the peak's sign, so that the peak is -8 steps exactly
# bits of a code -> (code of zero, smallest, largest)
CODE_RANGES = {4: (8, 0, 15), 8: (128, 1, 255)}
# Groups with a smaller peak decode to zero, because the reciprocal of their scale could overflow float32.
TINY_PEAK = 2.0**-100
FLOAT32_MAX = torch.finfo(torch.float32).max

EncodeGroups = Callable[[Tensor], tuple[Tensor, ...]]
"""Type of a function that encodes groups: from groups [A, G, B] to (codes uint8 [A, G, B], further tensors)."""


def pad_to(x: Tensor, length: int, with_last: bool = False) -> Tensor:
    """Extend the first dimension of a tensor to `length`, with zeros, or with copies of the last element if
    `with_last`."""
    missing = length - x.shape[0]
    if isinstance(missing, int) and missing == 0:  # a symbolic size is padded always, because it may be 0 or not
        return x
    shape = (missing, *x.shape[1:])
    return torch.cat([x, x[-1:].expand(shape) if with_last else x.new_zeros(shape)])


def cut_to_bfloat16(x: Tensor) -> Tensor:
    """Convert float32 to bfloat16, truncating towards zero."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def peaks_ref(x_AGB: Tensor, signed: bool) -> Tensor:
    """Return the peak of each group of `x_AGB`, with shape [A, B]. The result is bfloat16 for float32 elements.
    Elements in float16 or bfloat16 keep their dtype.

    If not `signed`, the peak is the largest absolute value. NaN counts as the largest. If `x_AGB` has no columns,
    [A, G], the peaks are [A].
    """
    high, low = x_AGB.amax(1).float(), x_AGB.amin(1).float()
    # If two magnitudes are equal, the negative element is the peak, here and in every other implementation.
    peaks = torch.where(-low >= high, low, high) if signed else torch.maximum(high, -low)
    return cut_to_bfloat16(peaks) if x_AGB.dtype == torch.float32 else peaks.to(x_AGB.dtype)


def inverse_ref(peaks: Tensor, factor: float) -> Tensor:
    """Return 1 / (peak * `factor`) in float32 for each peak. The code of an element is the element times this number,
    shifted and rounded. Return 0 for tiny and non-finite peaks: all elements of the group get the code of zero."""
    peaks = peaks.float()
    magnitude = peaks.abs()
    is_usable = (magnitude >= TINY_PEAK) & (magnitude <= FLOAT32_MAX)
    return torch.where(is_usable, (peaks * factor).reciprocal(), 0.0)


def encode_ref(x_AGB: Tensor, bits: int, factor: float) -> tuple[Tensor, Tensor]:
    """Encode `x_AGB` with plain torch operators. Return (codes, peaks).

    Codes are uint8, [A/2, G, B] for 4 bits (A is even) or [A, G, B] for 8 bits. Peaks are [A, B], in a 16-bit dtype,
    and absolute values if `factor` is positive (see `peaks_ref`). Codes of non-finite elements are unspecified.
    """
    if bits == 8:
        return _codes_ref(x_AGB, bits, factor)
    codes, peaks = packed_ref(lambda x: _codes_ref(x, bits, factor), x_AGB)
    return codes, peaks


def packed_ref(encode: EncodeGroups, x_AGB: Tensor) -> tuple[Tensor, ...]:
    """Encode `x_AGB` by `encode`, and pack the resulting 4-bit codes, two per byte. Return the packed
    codes [A/2, G, B], and the other tensors that `encode` returns."""
    is_strided = x_AGB.dim() > 2  # Inductor computes peaks and codes of strided groups in separate kernels anyway
    encode_all = packed_at_once if is_strided or x_AGB.device.type == "cpu" else packed_side_by_side
    return encode_all(encode, x_AGB)


def packed_at_once(encode: EncodeGroups, x_AGB: Tensor) -> tuple[Tensor, ...]:
    """Encode all groups, then pack their codes (see `packed_ref`). Faster on a CPU than `packed_side_by_side`. Compiled
    for a GPU, this would need two kernels that read all of `x_AGB`."""
    codes, *rest = encode(x_AGB)
    half = codes.shape[0] // 2
    return codes[:half] | (codes[half:] << 4), *rest


def packed_side_by_side(encode: EncodeGroups, x_AGB: Tensor) -> tuple[Tensor, ...]:
    """Encode each half of the groups, and pack the codes of both (see `packed_ref`). Inductor compiles this function to
    one kernel for a GPU."""
    half = x_AGB.shape[0] // 2
    low, *rest_of_low = encode(x_AGB[:half])
    high, *rest_of_high = encode(x_AGB[half:])
    return low | (high << 4), *(torch.cat(pair) for pair in zip(rest_of_low, rest_of_high, strict=True))


def _codes_ref(x_AGB: Tensor, bits: int, factor: float) -> tuple[Tensor, Tensor]:
    """Encode `x_AGB` with plain torch operators. Return (codes before packing, 16-bit peaks)."""
    zero, least, most = CODE_RANGES[bits]
    peaks_AB = peaks_ref(x_AGB, signed=factor < 0)
    shifted = x_AGB.float() * inverse_ref(peaks_AB, factor)[:, None] + (zero + 0.5)
    return shifted.clamp(least, most).to(torch.uint8), peaks_AB


def decode_ref(codes: Tensor, peaks_AB: Tensor, bits: int, factor: float, dtype: torch.dtype) -> Tensor:
    """Decode codes and peaks, the results of `encode_ref`, with plain torch. Return [A, G, B] in `dtype`. Every element
    of a group with a non-finite peak is non-finite."""
    steps = (unpack_ref(codes) if bits == 4 else codes).float() - CODE_RANGES[bits][0]
    return (steps * (peaks_AB.float() * factor)[:, None]).to(dtype)


def unpack_ref(packed: Tensor) -> Tensor:
    """Unpack 4-bit codes, two per byte, from uint8 [A/2, ...] to uint8 [A, ...]."""
    return torch.cat([packed & 15, packed >> 4])
