"""Python interface of _cpu.cpp, which is compiled at first use.

The C++ code is the fastest of three implementations. The table compares the time to encode a tensor with the time to
copy the tensor.
| implementation | 24 MiB of float32 | 12 MiB of bfloat16 |
|---|---|---|
| reference in plain torch | 30 times as long | 131 times as long |
| torch.compile of the reference | 4.1 times | 3.9 times |
| this code | 1.0 to 1.4 times | 1.0 to 1.4 times |

Both the C++ code and torch.compile need a C++ compiler. Compiling the C++ code takes about two seconds, once per
machine, and the library is stored in $XDG_CACHE_HOME/adacc_hf. The first use of torch.compile takes tens of seconds.
Without a compiler, the references in plain torch are used, and one warning is logged.
"""

import ctypes
import logging
import platform
import subprocess
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from adacc_hf.kernels import _symmetric
from adacc_hf.kernels._compiler import build
from adacc_hf.kernels._layout import even_groups, peak_dtype

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("_cpu.cpp")
# -march=native, because the library is built where it runs. -fopenmp is torch's OpenMP by name, so threads are shared.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # _cpu.cpp identifies dtypes by their index here
MAX_GROUP = _symmetric.GROUP_SIZES[-1]
TO_BUILD = "Install g++, point CXX to a compiler, or XDG_CACHE_HOME to a writable folder"
BYTES_PER_THREAD = 256 * 1024  # below this, waking a thread costs more than it saves

_POINTER, _SIZE = c_void_p, c_int64
_SIGNATURES = {
    "adacc_encode_groups": [*[_POINTER] * 4, *[_SIZE] * 4, c_int, c_int, c_float, c_int, c_int],
    "adacc_decode_groups": [*[_POINTER] * 3, *[_SIZE] * 3, c_int, c_int, c_float, c_int],
    "adacc_copy_channels": [*[_POINTER] * 3, *[_SIZE] * 3, c_int, c_int, c_int],
    "adacc_encode_asymmetric": [*[_POINTER] * 4, *[_SIZE] * 3, c_int, c_float, c_int],
    "adacc_decode_asymmetric": [*[_POINTER] * 4, *[_SIZE] * 3, c_int, c_float, c_int],
    "adacc_encode_columns": [*[_POINTER] * 3, *[_SIZE] * 4, c_int, c_float, c_int],
    "adacc_decode_columns": [*[_POINTER] * 3, *[_SIZE] * 4, c_int, c_float, c_int],
    "adacc_encode_fp8": [*[_POINTER] * 3, *[_SIZE] * 3, c_int, c_float, c_int],
    "adacc_decode_fp8": [*[_POINTER] * 3, *[_SIZE] * 3, c_int, c_float, c_int],
    "adacc_pack_bits": [*[_POINTER] * 3, *[_SIZE] * 2, c_int, c_int],
    "adacc_unpack_bits": [*[_POINTER] * 3, *[_SIZE] * 2, c_int, c_int],
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library of C++ codec kernels. If the library cannot be built, log one warning and return
    None."""
    try:
        compiled_library = ctypes.CDLL(str(build(SOURCE, FLAGS, [_processor_flags()])))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: no home folder exists
        logger.warning(
            "codecs run as plain torch on the CPU, at least ten times slower, because their C++ could not be built: "
            "%s. %s",
            (getattr(error, "stderr", None) or str(error)).strip(),
            TO_BUILD,
        )
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(compiled_library, name)
        function.argtypes, function.restype = arguments, None
    return compiled_library


@cache
def _cpp_kernels() -> ctypes.CDLL:
    """Return the library of C++ codec kernels. Use this only if `library()` is not None."""
    compiled_library = library()
    assert compiled_library is not None
    return compiled_library


def _processor_flags() -> str:
    """Return a description of the processor. The compiled codec kernels depend on the processor (-march=native)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _threads(num_bytes: int) -> int:
    return min(torch.get_num_threads(), 1 + num_bytes // BYTES_PER_THREAD)


def _data_pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def encode_groups(
    flat_N: Tensor, group_size: int, bits: int, factor: float, keep: Tensor | None = None, channels: int = 1
) -> tuple[Tensor, Tensor]:
    """Encode a contiguous tensor in A groups of G = `group_size` elements. Return (codes, peaks).

    Codes are uint8: [A/2, G] for 4 bits, [A, G] for 8 bits. Peaks have shape [A]. The result equals
    `_symmetric.encode_ref`, bit for bit. `keep` is `Outliers.keep` (0 for outlier channels, else -1), or None.
    """
    if group_size > MAX_GROUP:  # only for token_int4's rows, which are longer than the buffer that pads groups in C++
        flat_N = _symmetric.pad_to(flat_N, even_groups(flat_N.numel(), group_size) * group_size)
    numel = flat_N.numel()
    groups = even_groups(numel, group_size) if bits == 4 else -(-numel // group_size)
    rows = groups // 2 if bits == 4 else groups
    codes = torch.empty(rows, group_size, dtype=torch.uint8, device="cpu")
    peaks = torch.empty(groups, dtype=peak_dtype(flat_N.dtype), device="cpu")
    _cpp_kernels().adacc_encode_groups(
        flat_N.data_ptr(), codes.data_ptr(), peaks.data_ptr(), _data_pointer(keep), numel, group_size, rows, channels,
        DTYPES.index(flat_N.dtype), bits, factor, factor < 0, _threads(flat_N.nbytes),
    )  # fmt: skip
    return codes, peaks


def decode_groups(out_N: Tensor, codes: Tensor, peaks: Tensor, bits: int, factor: float) -> None:
    """Decode codes and peaks, the results of `encode_groups`, into `out_N`, a contiguous tensor."""
    rows, group_size = codes.shape
    _cpp_kernels().adacc_decode_groups(
        out_N.data_ptr(), codes.data_ptr(), peaks.data_ptr(), out_N.numel(), group_size, rows,
        DTYPES.index(out_N.dtype), bits, factor, _threads(out_N.nbytes),
    )  # fmt: skip


def gather_channels(x_RC: Tensor, indices: Tensor) -> Tensor:
    """Return [R, K]: a copy of the columns of a contiguous matrix at the positions `indices`, int32 [K]."""
    raw = torch.empty(x_RC.shape[0], indices.shape[0], dtype=x_RC.dtype, device="cpu")
    _copy_channels(x_RC, raw, indices, gather=True)
    return raw


def scatter_channels(out_RC: Tensor, raw: Tensor, indices: Tensor) -> None:
    """Write `raw` [R, K] to the columns of a contiguous matrix at the positions `indices`, int32 [K]."""
    _copy_channels(out_RC, raw, indices, gather=False)


def _copy_channels(x_RC: Tensor, raw: Tensor, indices: Tensor, gather: bool) -> None:
    _cpp_kernels().adacc_copy_channels(
        x_RC.data_ptr(), raw.data_ptr(), indices.data_ptr(), *x_RC.shape, indices.shape[0],
        x_RC.element_size(), gather, _threads(x_RC.nbytes),
    )  # fmt: skip


def encode_asymmetric(flat_N: Tensor, group_size: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Encode a contiguous tensor in A groups of G = `group_size` elements, each group with its own offset and range.
    Return 4-bit codes packed two per byte, uint8 [A/2, G], offsets [A], and (max - min) / 2 of each group, [A]. They
    equal the results of `asymmetric_int4.encode_ref`."""
    groups = even_groups(flat_N.numel(), group_size)
    codes = torch.empty(groups // 2, group_size, dtype=torch.uint8, device="cpu")
    offsets = torch.empty(groups, dtype=flat_N.dtype, device="cpu")
    half_ranges = torch.empty(groups, dtype=torch.bfloat16, device="cpu")
    _cpp_kernels().adacc_encode_asymmetric(
        flat_N.data_ptr(), codes.data_ptr(), offsets.data_ptr(), half_ranges.data_ptr(), flat_N.numel(), group_size,
        groups // 2, DTYPES.index(flat_N.dtype), factor, _threads(flat_N.nbytes),
    )  # fmt: skip
    return codes, offsets, half_ranges


def decode_asymmetric(out_N: Tensor, codes: Tensor, offsets: Tensor, half_ranges: Tensor, factor: float) -> None:
    """Decode the results of `encode_asymmetric` into `out_N`, a contiguous tensor."""
    rows, group_size = codes.shape
    _cpp_kernels().adacc_decode_asymmetric(
        out_N.data_ptr(), codes.data_ptr(), offsets.data_ptr(), half_ranges.data_ptr(), out_N.numel(), group_size,
        rows, DTYPES.index(out_N.dtype), factor, _threads(out_N.nbytes),
    )  # fmt: skip


def encode_columns(x_RC: Tensor, group_size: int, factor: float) -> tuple[Tensor, Tensor]:
    """Encode a contiguous matrix of C columns in A groups of G = `group_size` rows, each column of a group on its own.
    Return codes uint8 [A/2, G, C] and peaks [A, C]."""
    rows, columns = x_RC.shape
    groups = even_groups(rows, group_size)
    codes = torch.empty(groups // 2, group_size, columns, dtype=torch.uint8, device="cpu")
    peaks = torch.empty(groups, columns, dtype=peak_dtype(x_RC.dtype), device="cpu")
    _cpp_kernels().adacc_encode_columns(
        x_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), rows, columns, group_size, groups // 2,
        DTYPES.index(x_RC.dtype), factor, _threads(x_RC.nbytes),
    )  # fmt: skip
    return codes, peaks


def decode_columns(out_RC: Tensor, codes: Tensor, peaks: Tensor, factor: float) -> None:
    """Decode codes [A/2, G, C] and peaks [A, C], the results of `encode_columns`, into a contiguous matrix."""
    rows, columns = out_RC.shape
    pairs, group_size, _ = codes.shape
    _cpp_kernels().adacc_decode_columns(
        out_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), rows, columns, group_size, pairs,
        DTYPES.index(out_RC.dtype), factor, _threads(out_RC.nbytes),
    )  # fmt: skip


def encode_fp8(x_RC: Tensor, group_size: int, factor: float) -> tuple[Tensor, Tensor]:
    """Encode a contiguous matrix of R rows and C columns in FP8. Return codes uint8 [R, C] and the absmax of each
    group, [A], as `fp8.encode_ref` does."""
    rows, columns = x_RC.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device="cpu")
    peaks = torch.empty(rows * -(-columns // group_size), dtype=peak_dtype(x_RC.dtype), device="cpu")
    _cpp_kernels().adacc_encode_fp8(
        x_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), rows, columns, group_size, DTYPES.index(x_RC.dtype),
        factor, _threads(x_RC.nbytes),
    )  # fmt: skip
    return codes, peaks


def decode_fp8(out_RC: Tensor, codes: Tensor, peaks: Tensor, group_size: int, factor: float) -> None:
    """Decode the results of `encode_fp8` into a contiguous matrix."""
    rows, columns = out_RC.shape
    _cpp_kernels().adacc_decode_fp8(
        out_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), rows, columns, group_size,
        DTYPES.index(out_RC.dtype), factor, _threads(out_RC.nbytes),
    )  # fmt: skip


def pack_bits(patterns_N: Tensor, with_pattern: bool) -> tuple[Tensor, ...]:
    """Pack one bit per element, which is 1 for a nonzero element. Return uint8 [ceil(N / 8)], equal to the result of
    `bitmask.encode_ref`. If `with_pattern`, also return the bit pattern of the nonzero elements, which are all equal,
    as a tensor of shape [1]."""
    numel = patterns_N.numel()
    packed = torch.empty(-(-numel // 8), dtype=torch.uint8, device="cpu")
    pattern = torch.empty(1, dtype=patterns_N.dtype, device="cpu") if with_pattern else None
    _cpp_kernels().adacc_pack_bits(
        patterns_N.data_ptr(), packed.data_ptr(), _data_pointer(pattern), numel, packed.numel(),
        patterns_N.element_size(), _threads(patterns_N.nbytes),
    )  # fmt: skip
    return (packed,) if pattern is None else (packed, pattern)


def unpack_bits(out_N: Tensor, packed: Tensor, pattern: Tensor | None = None) -> None:
    """Decode packed bits into a contiguous tensor: 0 where the bit is 0, `pattern` (1 by default) where the bit is
    1."""
    _cpp_kernels().adacc_unpack_bits(
        out_N.data_ptr(), packed.data_ptr(), _data_pointer(pattern), out_N.numel(), packed.numel(),
        out_N.element_size(), _threads(out_N.nbytes),
    )  # fmt: skip
