"""What the Triton kernels share: the formulas of `_symmetric.py`, and the launcher.

Numbers are bit-equal to the references because every step is exact or rounded the same way: peaks are found as
integers, reciprocals use a correctly rounded division, and kernels are launched with enable_fp_fusion=False, since a
fused multiply-add rounds once where the reference rounds twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements a program handles of each half of the tensor, and how many of them a thread does: 16 codes fill 128 bits.
TILE_ELEMENTS = 2048
THREAD_ELEMENTS = 16
WARP_THREADS = 64 if torch.version.hip else 32
# Triton's interpreter cuts float32 to bfloat16, where GPUs round, and takes denormal bfloat16 for zeros.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

ALIGNMENT = 16  # bytes
MOST_RUNNERS = 4096
REMEMBERS_KERNELS = torch.version.hip is None  # for AMD's GPUs a kernel depends on the size of each storage too
_NUMBERS = frozenset({int, float, bool, type(None)})


# A seed of 1 must stay an argument, not become a constant of the kernel. So must what changes as training goes on, the
# number of outliers and that of rows, groups and pairs of these: compiling a kernel takes as long as some steps. What
# lies side by side in memory, `numel` or `columns`, is known to be a multiple of 16 or not, for 128 bits at a time.
jit = triton.jit(
    do_not_specialize=["seed", "num_outliers", "rows", "groups", "pairs", "channels", "half_rows", "half_columns"]
)


_runners: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[str, ...]]] = {}
"""Kernels that were launched, by all that Triton would look at to find them again, with the names of their constants
as the kernel has them, which is how it takes them: see `launch`."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    x: Tensor,
    *arguments: Any,
    tile: int = TILE_ELEMENTS,
    thread_elements: int = THREAD_ELEMENTS,
    **constants: Any,
) -> None:
    """Start `kernel(x, *arguments, **constants)` on x's device; nothing if the grid is empty. tile: its elements.

    What was launched once is launched again without Triton's look at every argument, which takes longer than a GPU does
    to encode 16 MiB. A kernel was compiled for the dtypes, the numbers and the constants that are its key, and for
    addresses that are multiples of 16: tensors at others take Triton's own way.
    """
    if 0 in grid:
        return
    key: list[Any] = [kernel.fn, grid, tile, thread_elements, x.get_device(), x.dtype, *constants.values()]
    addresses = x.data_ptr()
    for argument in arguments:
        if type(argument) in _NUMBERS:
            key.append(argument)
        else:
            key.append(argument.dtype)
            addresses |= argument.data_ptr()
    is_aligned = addresses % ALIGNMENT == 0
    with torch.cuda.device_of(x):
        found = _runners.get(tuple(key)) if is_aligned else None
        if found is not None:
            runner, names = found
            runner(x, *arguments, *[constants[name] for name in names])
            return
        warps = num_warps(tile, thread_elements)
        compiled = kernel[grid](x, *arguments, **constants, num_warps=warps, enable_fp_fusion=False)
        if compiled is not None and is_aligned and REMEMBERS_KERNELS:  # Triton's interpreter compiles nothing
            if len(_runners) >= MOST_RUNNERS:
                _runners.clear()
            names = tuple(name for name in kernel.arg_names if name in constants)
            _runners[tuple(key)] = compiled[(*grid, 1, 1)[:3]], names


def num_warps(tile: int, thread_elements: int, warp_threads: int = WARP_THREADS) -> int:
    """Warps of a program that handles `tile` elements, at most the 1024 threads of a block."""
    return min(max(tile // (thread_elements * warp_threads), 1), 1024 // warp_threads)


def groups_per_program(group_size: int, tile: int = TILE_ELEMENTS) -> int:
    """How many groups make up a program's tile."""
    return max(1, tile // group_size)


# Triton's own two may stand in a kernel too, and take ten times as long.
def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than `number`."""
    return 1 << (number - 1).bit_length()


@triton.jit
def peak_keys(x, SIGNED: tl.constexpr):
    """uint32: float bits with the sign rotated to the bottom. Unsigned order is that of magnitudes, NaN the largest."""
    bits = widened(x).to(tl.uint32, bitcast=True)
    keys = bits << 1
    if SIGNED:
        keys = keys | (bits >> 31)
    return keys


@triton.jit
def stored_peak(key, dtype: tl.constexpr):
    """The peak of a key as float32, cut to bfloat16 if the tensor is float32."""
    bits = (key >> 1) | (key << 31)
    if dtype == tl.float32:
        bits = bits & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def upper_half(bits):
    """bfloat16 from the upper halves of uint32 float patterns: a cut towards zero, exact for denormals too."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def in_16_bits(peak, dtype: tl.constexpr):
    """A stored peak in its 16-bit dtype."""
    return peak.to(tl.float16) if dtype == tl.float16 else upper_half(peak.to(tl.uint32, bitcast=True))


@triton.jit
def inverse_of(peak, factor):
    """Reciprocal of peak * factor; 0 where the peak is tiny, infinite or NaN."""
    magnitude = tl.abs(peak)
    usable = (magnitude >= 7.888609052210118e-31) & (magnitude <= 3.4028234663852886e38)
    scale = tl.where(usable, peak * factor, 1.0)
    return tl.where(usable, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)


@triton.jit
def rounding_offset(index, seed, zero, STOCHASTIC: tl.constexpr):
    """float32: the code of zero, plus one half or noise in [0, 1) hashed from the element's index and the seed."""
    fraction = 0.5
    if STOCHASTIC:
        x = index.to(tl.uint32) + seed.to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        x = (x ^ (x >> 16)) >> 8
        fraction = x.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return fraction + zero


@triton.jit
def codes_up_to(shifted, most):
    """int32 codes: the fraction cut off, NaN becoming the greatest code. `shifted` must lie above -1.

    That of symmetric 4-bit codes does: no element is more than 1 + 2^-7 times its group's stored peak, which is 8.07
    steps, and zero has code 8. Encoding at the speed of memory cannot afford a comparison that changes nothing.
    """
    return tl.minimum(shifted, most).to(tl.int32)


@triton.jit
def clipped_codes(shifted, least, most):
    """int32 codes: the fraction cut off, NaN becoming the least code."""
    return tl.minimum(tl.maximum(shifted, least), most).to(tl.int32)


@triton.jit
def widened(x):
    """Convert elements of any of the codecs' dtypes to float32: exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """float32 to the tensor's dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = upper_half(tl.where(x == x, nearest, bits))
    else:
        rounded = x.to(dtype)
    return rounded
