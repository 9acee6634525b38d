"""Naive per-token symmetric INT4: the "Quantization" baseline of the paper's evaluation (figure 3(b)(i)).

Each row (the last dimension) has one scale. Outliers are not treated specially.
"""

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import rows_and_columns
from adacc_hf.kernels.codecs import Codec, Kernels, register

BITS = 4
FACTOR = 1 / 8  # the paper's, by which a positive peak is clipped to 7 steps


def encode_ref(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `x_RC`, R rows of C elements, with plain torch. Return codes uint8 [A/2, C] and 16-bit peaks [A]. A is R,
    rounded up to an even number, because a byte holds two 4-bit codes. Each row is a group. The peak of a group is the
    row's element with the largest absolute value."""
    x_AC = _symmetric.pad_to(x_RC, x_RC.shape[0] + x_RC.shape[0] % 2)
    return _symmetric.encode_ref(x_AC, BITS, FACTOR)


def decode_ref(shape: tuple[int, int], dtype: torch.dtype, codes: Tensor, peaks: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return a matrix [R, C] of `shape` and `dtype`."""
    return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype)[: shape[0]]


def _encode_cpu(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    return _cpu.encode_groups(x_RC.view(-1), x_RC.shape[1], BITS, FACTOR)


def _decode_cpu(out_RC: Tensor, codes: Tensor, peaks: Tensor) -> None:
    _cpu.decode_groups(out_RC, codes, peaks, BITS, FACTOR)


@register
class TokenInt4(Codec):
    """Codec token_int4: symmetric INT4 with one scale per row, by the paper's formula for the scale."""

    name = "token_int4"
    is_baseline = True
    triton = "token_int4_triton"
    cpu = Kernels(_encode_cpu, _decode_cpu)
    keeps_rows = True

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES and rows_and_columns(shape)[1] > 0

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = rows_and_columns(shape)
        pairs = -(-rows // 2)
        return pairs * (columns + 2 * _symmetric.PEAK_BYTES)

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        return kernels.encode(x)

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return encode_ref(tensor.reshape(rows_and_columns(tuple(tensor.shape))))

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(rows_and_columns(size), dtype, *tensors).reshape(size)
