"""Channel-wise symmetric INT4 (paper 3.2), for Q, K and V in the layout in which autograd saves these tensors.

A channel is an index of the last dimension. Each scale covers `group_size` consecutive rows of a channel, not all rows.
A scale is therefore known within one tile of a kernel, so that encoding reads the tensor once. A scale for few rows
also fits the data better than a scale for all rows. Rows are in memory order, so transposed attention heads are encoded
without a copy. Only a view whose last dimension is not the innermost in memory is copied first.
"""

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import even_groups, rows_and_columns
from adacc_hf.kernels.codecs import Codec, Kernels, register

BITS = 4
FACTOR = _symmetric.SIGNED_FACTOR


def encode_ref(x_RC: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Encode `x_RC`, R rows of C channels, with plain torch. Return (codes uint8 [A/2, G, C], 16-bit peaks [A, C]).

    The rows are cut into A groups of G = `group_size` rows. A is rounded up to an even number, because a byte holds two
    4-bit codes. Each group has one peak per channel: the element with the largest absolute value among the channel's
    elements in the group's rows.
    """
    rows, columns = x_RC.shape
    groups = even_groups(rows, group_size)
    x_AGC = _symmetric.pad_to(x_RC, groups * group_size).view(groups, group_size, columns)
    return _symmetric.encode_ref(x_AGC, BITS, FACTOR)


def decode_ref(shape: tuple[int, int], dtype: torch.dtype, codes: Tensor, peaks: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return a matrix [R, C] of `shape` and `dtype`."""
    rows, columns = shape
    return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype).view(-1, columns)[:rows]


@register
class ChannelInt4(Codec):
    """Codec channel_int4: symmetric INT4 with one scale for each `group_size` rows of a channel."""

    name = "channel_int4"
    suits = frozenset({"qkv"})
    triton = "channel_int4_triton"
    cpu = Kernels(_cpu.encode_columns, _cpu.decode_columns)
    keeps_rows = True

    def __init__(self, group_size: int = 64) -> None:
        _symmetric.check_group_size(self.name, group_size)
        self.group_size = group_size

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES and rows_and_columns(shape)[1] > 0

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = rows_and_columns(shape)
        groups = even_groups(rows, self.group_size)
        return groups * columns * self.group_size // 2 + groups * columns * _symmetric.PEAK_BYTES

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        return kernels.encode(x, self.group_size, FACTOR)

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        kernels.decode(out, *tensors, FACTOR)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return encode_ref(tensor.reshape(rows_and_columns(tuple(tensor.shape))), self.group_size)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(rows_and_columns(size), dtype, *tensors).reshape(size)
