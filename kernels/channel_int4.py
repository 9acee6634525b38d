"""Channel-wise symmetric INT4 (paper 3.2), for Q, K and V in the layout in which autograd saves these tensors.

A channel is an index of the last dimension. Each scale covers `group_size` consecutive rows of a channel, not all rows.
A scale is therefore known within one tile of a kernel, so that encoding reads the tensor once. A scale for few rows
also fits the data better than a scale for all rows. Rows are in memory order, so transposed attention heads are encoded
without a copy. Only a view whose last dimension is not the innermost in memory is copied first.
"""

from functools import partial

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import even_groups, peak_dtype, rows_and_columns
from adacc_hf.kernels.codecs import GroupCodec, Kernels, Layout, register

BITS = 4
FACTOR = _symmetric.SIGNED_FACTOR


@register
class ChannelInt4(GroupCodec):
    """Codec channel_int4: symmetric INT4 with one scale for each `group_size` rows of a channel."""

    name = "channel_int4"
    suits = frozenset({"qkv"})
    triton = "channel_int4_triton"
    cpu = Kernels(*(partial(_cpu.run_columns, step, factor=FACTOR) for step in ("encode", "decode")))
    keeps_rows = True

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return super().supports(shape, dtype) and rows_and_columns(shape)[1] > 0

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        rows, columns = rows_and_columns(shape)
        groups = even_groups(rows, self.group_size)
        return ((groups // 2, self.group_size, columns), torch.uint8), ((groups, columns), peak_dtype(dtype))

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return (codes uint8 [A/2, G, C], 16-bit peaks [A, C]) for R rows of C channels.

        The rows are cut into A groups of G = `group_size` rows. A is rounded up to an even number, because a byte holds
        two 4-bit codes. Each group has one peak per channel: the element with the largest absolute value among the
        channel's elements in the group's rows.
        """
        rows, columns = rows_and_columns(tuple(tensor.shape))
        groups = even_groups(rows, self.group_size)
        padded = _symmetric.pad_to(tensor.reshape(rows, columns), groups * self.group_size)
        return _symmetric.encode_ref(padded.view(groups, self.group_size, columns), BITS, FACTOR)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        (codes, peaks), (rows, columns) = tensors, rows_and_columns(size)
        return _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype).view(-1, columns)[:rows].reshape(size)
