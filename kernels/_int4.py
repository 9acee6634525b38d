"""The arithmetic shared by the symmetric codecs, in plain torch: peaks, scales, rounding, packing.

Shapes: a tensor is seen as x_AGB, A groups of G elements in each of B columns, one peak per [A, B]. Group-wise codecs
have B = 1, token_int4 has one row per group, channel_int4 has B = channels. A is padded to an even number.

A group is stored as its peak (the element of largest magnitude, in 16 bits) and one 4-bit code per element. Codes are
0..15, where 8 stands for zero. Code bytes hold group a in their low and group a + A/2 in their high four bits, so that
packing joins two contiguous halves and never shuffles neighbours.

Why peaks in 16 bits: a float16 or bfloat16 peak is an element of the tensor, so it is exact; a float32 peak is cut to
bfloat16 towards zero, which keeps its range (up to 3e38) and can never decode to more than the peak, so nothing
overflows. Codes are computed from the stored peak, so its rounding costs no accuracy beyond the clipping stated in
`error_bound_steps`.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PEAK_BYTES = 2
ROUNDINGS = ("nearest", "stochastic")
# Factor from peak to scale. "signed" keeps the sign of the peak, so that the peak itself is code 0 (= -8).
SCALE_FACTORS = {"signed": -1 / 8, "paper": 1 / 8, "max7": 1 / 7}
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # powers of two: Triton's blocks; below 16 the peaks outweigh the codes
# Groups whose peak is below this decode to zero: the reciprocal of their scale could overflow float32.
TINY_PEAK = 2.0**-100
FLOAT32_MAX = torch.finfo(torch.float32).max


def check_options(codec: str, group_size: int, scale: str, rounding: str, scales: tuple[str, ...]) -> None:
    """Raise ValueError naming the option that is out of range."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"codec {codec!r}: group_size={group_size!r} is not one of {GROUP_SIZES}")
    if scale not in scales:
        raise ValueError(f"codec {codec!r}: scale={scale!r} is not one of {scales}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"codec {codec!r}: rounding={rounding!r} is not one of {ROUNDINGS}")


def peak_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the peaks of a tensor are stored."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def store_peak(peak: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 peaks of a tensor of `dtype`, in their 16-bit form; float32 is cut towards zero."""
    if dtype == torch.float32:
        peak = (peak.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return peak.to(peak_dtype(dtype))


def peaks_ref(x_AGB: Tensor, scale: str) -> Tensor:
    """[A, B] in 16 bits: the element of largest magnitude, its sign kept only by scale="signed". NaN wins."""
    high, low = x_AGB.amax(1).float(), x_AGB.amin(1).float()
    # On a tie the negative one is taken; the Triton kernels do the same.
    peak = torch.where(-low >= high, low, high) if scale == "signed" else torch.maximum(high, -low)
    return store_peak(peak, x_AGB.dtype)


def inverse_ref(peak: Tensor, factor: float) -> Tensor:
    """float32 reciprocal of the scales; 0 where the peak is tiny, infinite or NaN."""
    peak = peak.float()
    magnitude = peak.abs()
    usable = (magnitude >= TINY_PEAK) & (magnitude <= FLOAT32_MAX)
    return torch.where(usable, (peak * factor).reciprocal(), 0.0)


def noise_ref(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """float32 [count] in [0, 1): a hash of the element's index and the seed, so that no generator is touched.

    Index i gives u(i) = lowbias32(i + seed * 0x9E3779B9 mod 2^32) >> 8, times 2^-24.
    """
    mask = 0xFFFFFFFF
    x = (torch.arange(first, first + count, dtype=torch.int64, device=device) + seed * 0x9E3779B9 % 2**32) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24


def round_offset(x_AGB: Tensor, rounding: str, seed: int) -> Tensor | float:
    """What to add before cutting off the fraction: one half, or noise in [0, 1)."""
    if rounding == "nearest":
        return 0.5
    return noise_ref(0, x_AGB.numel(), seed, x_AGB.device).view(x_AGB.shape)


def encode_ref(x_AGB: Tensor, scale: str, rounding: str, seed: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [A/2, G, B] and 16-bit peaks [A, B]. A is even."""
    peaks_AB = peaks_ref(x_AGB, scale)
    inverse_AB = inverse_ref(peaks_AB, SCALE_FACTORS[scale])
    shifted = x_AGB.float() * inverse_AB[:, None] + (round_offset(x_AGB, rounding, seed) + 8.0)
    codes = shifted.to(torch.uint8).clamp(max=15)
    return pack_ref(codes), peaks_AB


def decode_ref(codes: Tensor, peaks_AB: Tensor, scale: str, dtype: torch.dtype) -> Tensor:
    """[A, G, B] from codes and peaks. Every element of a group with a non-finite peak is non-finite."""
    scale_AB = peaks_AB.float() * SCALE_FACTORS[scale]
    return ((unpack_ref(codes).float() - 8.0) * scale_AB[:, None]).to(dtype)


def pack_ref(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: uint8 [A/2, ...] from uint8 [A, ...]."""
    half = codes.shape[0] // 2
    return codes[:half] | (codes[half:] << 4)


def unpack_ref(packed: Tensor) -> Tensor:
    """uint8 [A, ...] codes from uint8 [A/2, ...]."""
    return torch.cat([packed & 15, packed >> 4])


def even_groups(count: int, group_size: int) -> int:
    """The number of groups that `count` elements take, padded to an even number."""
    return -(-count // (2 * group_size)) * 2


def pad_to(x: Tensor, length: int, with_last: bool = False) -> Tensor:
    """`x` with zeros, or copies of its last element, appended along its first dimension up to `length`."""
    missing = length - x.shape[0]
    if missing == 0:
        return x
    shape = (missing, *x.shape[1:])
    return torch.cat([x, x[-1:].expand(shape) if with_last else x.new_zeros(shape)])
