"""Channel-wise symmetric INT4 (paper 3.2), for Q, K and V in the layout they are saved in.

A channel is an index of the last dimension. One scale serves `group_size` consecutive rows of one channel rather than
all rows: the scale is then known within one tile, so that encoding reads the tensor once, and it follows the data
more closely.
"""

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore, rows_and_columns
from adacc_hf.kernels.codecs import Codec, Payload, register


@register
class ChannelInt4(Codec):
    """Symmetric INT4 with one scale per channel and `group_size` rows."""

    name = "channel_int4"

    def __init__(self, group_size: int = 64, scale: str = "signed", rounding: str = "nearest", seed: int = 0) -> None:
        _int4.check_options(self.name, group_size, scale, rounding, tuple(_int4.SCALE_FACTORS))
        self.group_size = group_size
        self.scale = scale
        self.rounding = rounding
        self.seed = seed

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _int4.FLOAT_DTYPES

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = rows_and_columns(shape)
        groups = _int4.even_groups(rows, self.group_size)
        return groups * columns * (self.group_size // 2 + _int4.PEAK_BYTES)

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        rows, columns = rows_and_columns(tuple(tensor.shape))
        groups = _int4.even_groups(rows, self.group_size)
        x_RC = as_flat(tensor, keep_rows=True).view(rows, columns)
        x_AGC = _int4.pad_to(x_RC, groups * self.group_size).view(groups, self.group_size, columns)
        tensors = _int4.encode_ref(x_AGC, self.scale, self.rounding, self.seed)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        codes, peaks = payload.tensors

        def fill(out_N: Tensor) -> None:
            out_N.copy_(_int4.decode_ref(codes, peaks, self.scale, payload.dtype).view(-1)[: out_N.shape[0]])

        return restore(fill, payload.size, payload.stride, payload.dtype, codes.device, keep_rows=True)
