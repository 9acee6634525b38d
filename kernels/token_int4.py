"""Naive per-token symmetric INT4: the "Quantization" baseline of the paper's evaluation (figure 3(b)(i)).

Each row (the last dimension) has one scale. Outliers are not treated specially.
"""

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import peak_dtype, rows_and_columns
from adacc_hf.kernels.codecs import Codec, Kernels, Layout, register

BITS = 4
FACTOR = 1 / 8  # the paper's, by which a positive peak is clipped to 7 steps


def _encode_cpu(x_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    # The buffer that pads groups in C++ is shorter than some rows, so the missing row is added here.
    x_AC = _symmetric.pad_to(x_RC, 2 * codes.shape[0])
    _cpu.encode_groups(x_AC.view(-1), codes, peaks, BITS, FACTOR)


def _decode_cpu(out_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    _cpu.decode_groups(out_RC, codes, peaks, BITS, FACTOR)


@register
class TokenInt4(Codec):
    """Codec token_int4: symmetric INT4 with one scale per row, by the paper's formula for the scale."""

    name = "token_int4"
    triton = "token_int4_triton"
    cpu = Kernels(_encode_cpu, _decode_cpu)
    keeps_rows = True

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES and rows_and_columns(shape)[1] > 0

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        rows, columns = rows_and_columns(shape)
        pairs = -(-rows // 2)
        return ((pairs, columns), torch.uint8), ((2 * pairs,), peak_dtype(dtype))

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return codes uint8 [A/2, C] and 16-bit peaks [A] for R rows of C elements. A is R, rounded up to an even
        number, because a byte holds two 4-bit codes. Each row is a group. The peak of a group is the row's element with
        the largest absolute value."""
        x_RC = tensor.reshape(rows_and_columns(tuple(tensor.shape)))
        return _symmetric.encode_ref(_symmetric.pad_to(x_RC, x_RC.shape[0] + x_RC.shape[0] % 2), BITS, FACTOR)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes, peaks = tensors
        return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype)[: rows_and_columns(size)[0]].reshape(size)
