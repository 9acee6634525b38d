"""Shared parts of the Triton kernels: the formulas of `_symmetric.py`, and the launcher.

Results are bit-equal to the references, because every step is exact or rounded in the same way. Peaks (elements with
the largest absolute value) are compared as integers, and reciprocals use a correctly rounded division. Kernels are
launched with enable_fp_fusion=False, because a fused multiply-add rounds once where the reference rounds twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of each half of the tensor per program, and per thread: 16 codes fill 128 bits.
TILE_ELEMENTS = 2048
THREAD_ELEMENTS = 16
WARP_THREADS = 64 if torch.version.hip else 32
# Triton's interpreter truncates float32 to bfloat16, where GPUs round, and treats denormal bfloat16 as zeros.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

ALIGNMENT = 16  # bytes
MAX_RUNNERS = 4096
CACHES_KERNELS = torch.version.hip is None  # on AMD's GPUs a kernel also depends on the size of each storage
_NUMBERS = frozenset({int, float, bool, type(None)})


# Arguments that Triton must not specialize on: numbers that change during training (outliers, rows, groups and their
# pairs), because compiling a kernel takes as long as some steps. The contiguous lengths `numel` and `columns` are
# specialized on divisibility by 16, for 128-bit accesses.
jit = triton.jit(do_not_specialize=["num_outliers", "rows", "groups", "pairs", "channels", "half_rows", "half_columns"])


runners: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[str, ...]]] = {}
"""Cache of compiled Triton kernels. An entry is (function that starts the kernel, names of the kernel's constants in
order).

The key contains everything by which Triton selects a compiled kernel (`launch`).
"""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    x: Tensor,
    *arguments: Any,
    tile: int = TILE_ELEMENTS,
    thread_elements: int = THREAD_ELEMENTS,
    **constants: Any,
) -> None:
    """Start the Triton kernel `kernel(x, *arguments, **constants)` on the device of `x`, unless the grid is empty.

    `tile` is the number of elements per program, and `thread_elements` the number per thread. A repeated launch uses a
    cached kernel. This skips Triton's inspection of every argument, which takes longer than a GPU needs to encode 16
    MiB. The cache key contains the dtypes, numbers and constants that a kernel was compiled for. Cached kernels assume
    addresses that are multiples of 16. For tensors at other addresses, the kernel is launched by Triton's own launcher.
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
        cached_runner = runners.get(tuple(key)) if is_aligned else None
        if cached_runner is not None:
            runner, names = cached_runner
            runner(x, *arguments, *[constants[name] for name in names])
            return
        warps = num_warps(tile, thread_elements)
        compiled = kernel[grid](x, *arguments, **constants, num_warps=warps, enable_fp_fusion=False)
        if compiled is not None and is_aligned and CACHES_KERNELS:  # Triton's interpreter compiles nothing
            if len(runners) >= MAX_RUNNERS:
                runners.clear()
            names = tuple(name for name in kernel.arg_names if name in constants)
            runners[tuple(key)] = compiled[(*grid, 1, 1)[:3]], names


def num_warps(tile: int, thread_elements: int, warp_threads: int = WARP_THREADS) -> int:
    """Return the number of warps of a program with `tile` elements, limited to 1024 threads per program."""
    return min(max(tile // (thread_elements * warp_threads), 1), 1024 // warp_threads)


def groups_per_program(group_size: int, tile: int = TILE_ELEMENTS) -> int:
    """Return the number of groups of elements that one program with `tile` elements handles."""
    return max(1, tile // group_size)


# Triton's functions of the same names can be used in kernels too, but take ten times as long on the host.
def cdiv(number: int, divisor: int) -> int:
    """Return `number` / `divisor`, rounded up, for the grid of a Triton kernel."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@triton.jit
def peak_keys(x, SIGNED: tl.constexpr):
    """Return uint32 keys that sort the elements of x by magnitude, with NaN largest. A key is the bits of the element
    as a float32. The sign is moved to the lowest bit if SIGNED, and dropped otherwise."""
    bits = widened(x).to(tl.uint32, bitcast=True)
    keys = bits << 1
    if SIGNED:
        keys = keys | (bits >> 31)
    return keys


@triton.jit
def stored_peak(key, dtype: tl.constexpr):
    """Convert `key`, the largest key that `peak_keys` returned for a group, back to the float32 element: the group's
    peak. `dtype` is the dtype of the encoded tensor. If `dtype` is float32, the peak is truncated to a bfloat16
    number."""
    bits = (key >> 1) | (key << 31)
    if dtype == tl.float32:
        bits = bits & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def upper_half(bits):
    """Convert the uint32 bits of float32 numbers to bfloat16, truncated towards zero, also for denormals."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def in_16_bits(peak, dtype: tl.constexpr):
    """Convert a group's peak, a float32 number, to the 16-bit dtype in which it is stored. Peaks of float16 tensors are
    stored as float16, peaks of all other tensors as bfloat16."""
    return peak.to(tl.float16) if dtype == tl.float16 else upper_half(peak.to(tl.uint32, bitcast=True))


@triton.jit
def inverse_of(peak, factor):
    """Return the reciprocal of peak * factor, or 0 if the peak is tiny, infinite or NaN."""
    magnitude = tl.abs(peak)
    is_usable = (magnitude >= 7.888609052210118e-31) & (magnitude <= 3.4028234663852886e38)
    scale = tl.where(is_usable, peak * factor, 1.0)
    return tl.where(is_usable, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)


@triton.jit
def codes_up_to(shifted, most):
    """Truncate `shifted` to int32 codes of at most `most`. NaN becomes `most`.

    `shifted` must be above -1. Truncation turns numbers between -1 and 0 into 0, so that no clip from below is needed.
    INT4 satisfies this: the code of zero is 8, and no element lies more than 8.07 steps below zero, because an element
    is at most 1 + 2^-7 times its group's stored peak. A clip from below would take more time than the memory traffic of
    encoding.
    """
    return tl.minimum(shifted, most).to(tl.int32)


@triton.jit
def clipped_codes(shifted, least, most):
    """Truncate `shifted` to int32 codes from `least` to `most`. NaN becomes `least`."""
    return tl.minimum(tl.maximum(shifted, least), most).to(tl.int32)


@triton.jit
def widened(x):
    """Convert elements of any dtype that codecs support to float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Convert the float32 values `x` to `dtype`, rounding to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = upper_half(tl.where(x == x, nearest, bits))
    else:
        rounded = x.to(dtype)
    return rounded
