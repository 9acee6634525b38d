"""Naive per-token symmetric INT4: the "Quantization" baseline of the paper's evaluation (figure 3(b)(i)).

One scale per row, the row being the last dimension, with no care for outliers.
"""

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore, rows_and_columns
from adacc_hf.kernels.codecs import Codec, Payload, register


@register
class TokenInt4(Codec):
    """Symmetric INT4 with one scale per row, by default the paper's scale."""

    name = "token_int4"

    def __init__(self, scale: str = "paper", rounding: str = "nearest", seed: int = 0) -> None:
        _int4.check_options(self.name, _int4.GROUP_SIZES[0], scale, rounding, tuple(_int4.SCALE_FACTORS))
        self.scale = scale
        self.rounding = rounding
        self.seed = seed

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _int4.FLOAT_DTYPES and rows_and_columns(shape)[1] > 0

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = rows_and_columns(shape)
        pairs = -(-rows // 2)
        return pairs * (columns + 2 * _int4.PEAK_BYTES)

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        rows, columns = rows_and_columns(tuple(tensor.shape))
        x_RC = as_flat(tensor, keep_rows=True).view(rows, columns)
        x_RC1 = _int4.pad_to(x_RC, rows + rows % 2)[..., None]
        tensors = _int4.encode_ref(x_RC1, self.scale, self.rounding, self.seed)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        codes, peaks = payload.tensors

        def fill(out_N: Tensor) -> None:
            out_N.copy_(_int4.decode_ref(codes, peaks, self.scale, payload.dtype).view(-1)[: out_N.shape[0]])

        return restore(fill, payload.size, payload.stride, payload.dtype, codes.device, keep_rows=True)
