"""Outlier-separated INT4 (paper 3.2, eq. 1 and 2), for Linear, LayerNorm and GELU activations.

The channels (last dimension) with the largest absolute sums are set to zero and kept raw beside their indices; the
rest is symmetric group-wise INT4 over the flat tensor. The number of channels is fixed, so payloads have static
shapes; which channels they are is state, chosen by `fit` at tracking iterations.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _int4
from adacc_hf.kernels._layout import as_flat, restore, rows_and_columns
from adacc_hf.kernels.codecs import Codec, Payload, register

INDEX_BYTES = 4


def channel_sums(tensor: Tensor) -> Tensor:
    """float32 [C]: the sum of magnitudes of every channel, S_h in the paper's eq. 1."""
    rows, columns = rows_and_columns(tuple(tensor.shape))
    return as_flat(tensor, keep_rows=True).view(rows, columns).abs().sum(0, dtype=torch.float32)


def zscores(sums_C: Tensor) -> Tensor:
    """float32 [C]: how many standard deviations each channel's sum is above the mean (eq. 1); 0 if all are equal."""
    deviation = sums_C.std(correction=0)
    return torch.where(deviation > 0, (sums_C - sums_C.mean()) / deviation, 0.0)


@torch.no_grad()
def count_outliers(tensor: Tensor, threshold: float = 3.0) -> int:
    """The number of channels with a Z-score above `threshold`. Synchronises: for tracking iterations only."""
    return int((zscores(channel_sums(tensor)) > threshold).sum())


@dataclass(frozen=True, slots=True)
class _Outliers:
    """The channels that a codec keeps raw."""

    indices: Tensor  # int64 [K], ascending
    channels: int


@register
class OutlierInt4(Codec):
    """INT4 in groups, with `num_outliers` raw channels; num_outliers=0 is plain symmetric group-wise INT4."""

    name = "outlier_int4"

    def __init__(
        self,
        group_size: int = 64,
        scale: str = "signed",
        rounding: str = "nearest",
        seed: int = 0,
        num_outliers: int = 0,
        zscore_threshold: float = 3.0,
    ) -> None:
        _int4.check_options(self.name, group_size, scale, rounding, tuple(_int4.SCALE_FACTORS))
        if num_outliers < 0:
            raise ValueError(f"codec {self.name!r}: num_outliers={num_outliers} must be 0 or more")
        self.group_size = group_size
        self.scale = scale
        self.rounding = rounding
        self.seed = seed
        self.num_outliers = num_outliers
        self.zscore_threshold = zscore_threshold
        self._outliers: _Outliers | None = None

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _int4.FLOAT_DTYPES and rows_and_columns(shape)[1] >= self.num_outliers

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        groups = _int4.even_groups(prod(shape), self.group_size)
        rows, _ = rows_and_columns(shape)
        raw_bytes = self.num_outliers * (rows * dtype.itemsize + INDEX_BYTES)
        return groups * self.group_size // 2 + groups * _int4.PEAK_BYTES + raw_bytes

    @torch.no_grad()
    def fit(self, tensor: Tensor) -> None:
        """Choose the `num_outliers` channels with the largest absolute sums. Does not synchronise."""
        if self.num_outliers:
            sums_C = channel_sums(tensor)
            indices_K = sums_C.topk(self.num_outliers).indices.sort().values
            self._outliers = _Outliers(indices_K, sums_C.shape[0])

    @torch.no_grad()
    def encode(self, tensor: Tensor) -> Payload:
        self._require(tensor)
        flat = as_flat(tensor, keep_rows=True)
        kept: tuple[Tensor, ...] = ()
        if self.num_outliers:
            indices_K = self._fitted(tensor)
            x_RC = flat.view(rows_and_columns(tuple(tensor.shape)))
            kept = (x_RC.index_select(1, indices_K), indices_K.int())
            flat = x_RC.index_fill(1, indices_K, 0).view(-1)
        groups = _int4.even_groups(flat.shape[0], self.group_size)
        x_AGB = _int4.pad_to(flat, groups * self.group_size).view(groups, self.group_size, 1)
        codes, peaks = _int4.encode_ref(x_AGB, self.scale, self.rounding, self.seed)
        return Payload((codes, peaks, *kept), tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def decode(self, payload: Payload) -> Tensor:
        codes, peaks, *kept = payload.tensors

        def fill(out_N: Tensor) -> None:
            out_N.copy_(_int4.decode_ref(codes, peaks, self.scale, payload.dtype).view(-1)[: out_N.shape[0]])
            if kept:
                raw_RK, indices_K = kept
                out_N.view(rows_and_columns(payload.size)).index_copy_(1, indices_K.long(), raw_RK)

        return restore(fill, payload.size, payload.stride, payload.dtype, codes.device, keep_rows=True)

    def _fitted(self, tensor: Tensor) -> Tensor:
        """int64 [K]: the raw channels, chosen from `tensor` if never chosen before."""
        if self._outliers is None:
            self.fit(tensor)
        channels = rows_and_columns(tuple(tensor.shape))[1]
        if self._outliers.channels != channels:
            raise ValueError(
                f"codec {self.name!r} was fitted to {self._outliers.channels} channels and got a tensor with "
                f"{channels}; use one codec object per activation"
            )
        return self._outliers.indices
