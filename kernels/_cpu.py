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

from adacc_hf.kernels._compiler import build

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("_cpu.cpp")
# -march=native, because the library is built where it runs. -fopenmp is torch's OpenMP by name, so threads are shared.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # _cpu.cpp identifies dtypes by their index here
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


# Each function writes the tensors of a payload, or decodes them into `out`. All tensors are contiguous. The results
# equal those of the formulas (`encode_traceable`, `decode_traceable`), bit for bit.


def encode_groups(
    flat_N: Tensor,
    codes: Tensor,
    peaks: Tensor,
    bits: int,
    factor: float,
    keep: Tensor | None = None,
    channels: int = 1,
) -> None:
    """Encode a tensor in A groups of G elements. Codes are uint8: [A/2, G] for 4 bits, [A, G] for 8 bits. Peaks have
    shape [A]. `keep` is `Outliers.keep` (0 for outlier channels, else -1), or None. The last group may be incomplete
    only if G is at most the largest of `GROUP_SIZES`."""
    rows, group_size = codes.shape
    _cpp_kernels().adacc_encode_groups(
        flat_N.data_ptr(), codes.data_ptr(), peaks.data_ptr(), _data_pointer(keep), flat_N.numel(), group_size, rows,
        channels, DTYPES.index(flat_N.dtype), bits, factor, factor < 0, _threads(flat_N.nbytes),
    )  # fmt: skip


def decode_groups(out_N: Tensor, codes: Tensor, peaks: Tensor, bits: int, factor: float) -> None:
    """Decode the results of `encode_groups`."""
    rows, group_size = codes.shape
    _cpp_kernels().adacc_decode_groups(
        out_N.data_ptr(), codes.data_ptr(), peaks.data_ptr(), out_N.numel(), group_size, rows,
        DTYPES.index(out_N.dtype), bits, factor, _threads(out_N.nbytes),
    )  # fmt: skip


def copy_channels(x_RC: Tensor, raw: Tensor, indices: Tensor, *, gather: bool) -> None:
    """Copy the columns of a matrix at the positions `indices`, int32 [K], to `raw` [R, K] if `gather`, else from it."""
    _cpp_kernels().adacc_copy_channels(
        x_RC.data_ptr(), raw.data_ptr(), indices.data_ptr(), *x_RC.shape, indices.shape[0],
        x_RC.element_size(), gather, _threads(x_RC.nbytes),
    )  # fmt: skip


def run_asymmetric(step: str, x_N: Tensor, codes: Tensor, offsets: Tensor, half_ranges: Tensor, factor: float) -> None:
    """Run the `step` "encode" or "decode" for A groups of G elements, each group with its own offset and range: 4-bit
    codes packed two per byte, uint8 [A/2, G], offsets [A], and (max - min) / 2 of each group, [A]."""
    rows, group_size = codes.shape
    getattr(_cpp_kernels(), f"adacc_{step}_asymmetric")(
        x_N.data_ptr(), codes.data_ptr(), offsets.data_ptr(), half_ranges.data_ptr(), x_N.numel(), group_size,
        rows, DTYPES.index(x_N.dtype), factor, _threads(x_N.nbytes),
    )  # fmt: skip


def run_columns(step: str, x_RC: Tensor, codes: Tensor, peaks: Tensor, factor: float) -> None:
    """Run the `step` "encode" or "decode" for a matrix of C columns in A groups of G rows, each column of a group
    separately: codes uint8 [A/2, G, C] and peaks [A, C]."""
    pairs, group_size, _ = codes.shape
    getattr(_cpp_kernels(), f"adacc_{step}_columns")(
        x_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), *x_RC.shape, group_size, pairs,
        DTYPES.index(x_RC.dtype), factor, _threads(x_RC.nbytes),
    )  # fmt: skip


def run_fp8(step: str, x_RC: Tensor, codes: Tensor, peaks: Tensor, group_size: int, factor: float) -> None:
    """Run the `step` "encode" or "decode" for a matrix of R rows and C columns in FP8: codes uint8 [R, C], and the
    absmax of each group, [A]."""
    getattr(_cpp_kernels(), f"adacc_{step}_fp8")(
        x_RC.data_ptr(), codes.data_ptr(), peaks.data_ptr(), *x_RC.shape, group_size, DTYPES.index(x_RC.dtype),
        factor, _threads(x_RC.nbytes),
    )  # fmt: skip


def run_bits(step: str, patterns_N: Tensor, packed: Tensor, pattern: Tensor | None = None) -> None:
    """Run the `step` "pack" or "unpack" for one bit per element, which is 1 for a nonzero element: uint8 [ceil(N / 8)].
    `pattern` [1] is the bit pattern of the nonzero elements, which are all equal (1 by default)."""
    getattr(_cpp_kernels(), f"adacc_{step}_bits")(
        patterns_N.data_ptr(), packed.data_ptr(), _data_pointer(pattern), patterns_N.numel(), packed.numel(),
        patterns_N.element_size(), _threads(patterns_N.nbytes),
    )  # fmt: skip
