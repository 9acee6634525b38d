"""FP8 (E4M3) with one scale for `group_size` elements of a row, for tensors with a few very large elements.

An E4M3 code consists of a sign, 4 bits of exponent and 3 of mantissa. The largest number is 448, the smallest normal
number is 2^-6, and numbers below 2^-6 are spaced by 2^-9. A row is the last dimension. The last group of a row may be
shorter. No group reaches into another row. The group's absmax (largest absolute value) maps to 448. As in the other
codecs, a float32 absmax is stored as bfloat16, truncated by up to 2^-7, so the largest element scales to at most 451.5,
which also rounds to 448.

In `int8`, all elements of a group are rounded to multiples of one step. The step of FP8 is relative: the rounding error
is at most 2^-4 of the element. INT8 is better for elements of similar size, FP8 for small elements next to a large
element. Groups are larger than in the other codecs, because each code has its own exponent.

Rounding, here and in the kernels, is integer arithmetic, which is tested against torch's `.to(torch.float8_e4m3fn)`.
Triton's own cast does not compile for sm_80, converts through float16 on sm_89, and rounds some midpoints up in the
interpreter.
"""

from functools import partial

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import peak_dtype, rows_and_columns
from adacc_hf.kernels.codecs import GroupCodec, Kernels, Layout, register
from adacc_hf.kernels.int8 import Int8

FACTOR = 1 / 448
EXPONENT = 0x7F800000  # the bits of a float32's exponent
LEAST_NORMAL = 121 << 23  # 2^-6 as a float32
UNIT = 136 << 23  # 2^9: number of code steps per 1.0, below the least normal number
LARGEST_CODE = 126
HALF_SCALE = 2.0**8  # the bits of a code, moved into a float16, represent 2^-8 times the code's number


def codes_ref(scaled: Tensor) -> Tensor:
    """Convert float32 elements to uint8 E4M3 codes, rounded to nearest even. `scaled` are the elements after scaling,
    at most 452 in magnitude. Elements beyond 448 get the code of 448. Codes of non-finite elements are unspecified."""
    bits = scaled.view(torch.int32)
    # Exponent of each element minus the exponent of the least normal number. Below that number, steps no longer shrink.
    above = ((bits & EXPONENT) - LEAST_NORMAL).clamp(min=0)
    steps = scaled.abs() * (UNIT - above).view(torch.float32)  # exact: a power of two
    # A mantissa that rounds up to 16 steps carries into the exponent, as the addition does.
    magnitude = ((above >> 20) + steps.round().to(torch.int32)).clamp(max=LARGEST_CODE)
    return (magnitude | ((bits >> 24) & 128)).to(torch.uint8)


def numbers_ref(codes: Tensor) -> Tensor:
    """Convert E4M3 codes to float32: return the number that each code stands for, divided by `HALF_SCALE`. The result
    is exact."""
    wide = codes.to(torch.int32)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(torch.int16).view(torch.float16).float()


def _groups_of_rows(x_RC: Tensor, group_size: int) -> Tensor:
    """Return the groups of all rows, [A, G]. The last group of each row is padded with zeros."""
    rows, columns = x_RC.shape
    missing = -columns % group_size
    padded_RW = x_RC if _is_certainly_zero(missing) else torch.nn.functional.pad(x_RC, (0, missing))
    return padded_RW.reshape(rows * ((columns + missing) // group_size), group_size)


def _rows_of_groups(x_AG: Tensor, rows: int, columns: int) -> Tensor:
    """Join the groups made by `_groups_of_rows`, and return the original rows [R, C]."""
    missing = -columns % x_AG.shape[1]
    x_RW = x_AG.reshape(rows, columns + missing)
    return x_RW if _is_certainly_zero(missing) else x_RW[:, :columns].clone()


def _is_certainly_zero(number: int) -> bool:
    """Return True if `number` is known to be 0. In a compiled graph, a number may be known only when the graph runs."""
    return isinstance(number, int) and number == 0


@register
class Fp8(GroupCodec):
    """Codec fp8: FP8 (E4M3) in groups of a row. The absmax (largest absolute value) of each group is scaled to 448."""

    name = "fp8"
    suits = frozenset({"input"})
    # INT8 is the better codec unless a few elements are very large. On the block inputs of small GPT-2 and LLaMA
    # models, the relative error of INT8 is 0.005 to 0.006 and that of FP8 is 0.026, and INT8 takes 1.5 % more bytes
    # (none with groups of 128 as here) and no more time. If two of 4096 channels are 300 times as large as the others,
    # the error of INT8 is 0.015 and that of FP8 is 0.005.
    instead_of = Int8.name
    triton = "fp8_triton"
    cpu = Kernels(*(partial(_cpu.run_fp8, step, factor=FACTOR) for step in ("encode", "decode")))
    keeps_rows = True

    def __init__(self, group_size: int = 128) -> None:
        super().__init__(group_size)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        rows, columns = rows_and_columns(shape)
        return ((rows, columns), torch.uint8), ((rows * -(-columns // self.group_size),), peak_dtype(dtype))

    def encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        codes, peaks = self._new_tensors(x)
        kernels.encode(x, codes, peaks, self.group_size)
        return codes, peaks

    def decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors, self.group_size)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return codes uint8 [R, C] and the absmax of each group, [A] in a 16-bit dtype, for R rows of C columns.

        Each row is cut into groups of `group_size` elements, the last of which may be shorter. A is the number of
        groups of all rows.
        """
        rows, columns = rows_and_columns(tuple(tensor.shape))
        x_AG = _groups_of_rows(tensor.reshape(rows, columns), self.group_size)
        peaks = _symmetric.peaks_ref(x_AG, signed=False)
        scaled_AG = x_AG.float() * _symmetric.inverse_ref(peaks, FACTOR)[:, None]
        return _rows_of_groups(codes_ref(scaled_AG), rows, columns), peaks

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode codes and peaks. Every element of a group whose absmax (largest absolute value) is non-finite is
        non-finite."""
        codes, peaks = tensors
        numbers_AG = numbers_ref(_groups_of_rows(codes, self.group_size))
        scales_A = peaks.float() * FACTOR * HALF_SCALE
        return _rows_of_groups((numbers_AG * scales_A[:, None]).to(dtype), *codes.shape).reshape(size)
