"""Outlier-separated INT4 (paper 3.2, eq. 1 and 2), for Linear, LayerNorm and GELU activations.

The channels (indices of the last dimension) with the largest sums of absolute values are stored uncompressed (raw) with
their indices, and replaced by zeros. The other elements are encoded by symmetric group-wise INT4 over the flat tensor.
The number of channels is fixed, so payloads have static shapes. The choice of channels is a state of the codec, which
`fit` sets in tracking steps.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._layout import even_groups, peak_dtype, rows_and_columns
from adacc_hf.kernels.codecs import GroupCodec, Kernels, Layout, register

BITS = 4
FACTOR = _symmetric.SIGNED_FACTOR
ZSCORE_THRESHOLD = 3.0
"""Z-score above which a channel is an outlier (eq. 1), the paper's value."""


@dataclass(frozen=True, slots=True)
class Outliers:
    """Outlier channels, which the codec stores uncompressed (raw), in several forms that the kernels read."""

    channels: int
    """C, the total number of channels."""
    indices: Tensor
    """int32 [K], the indices of the outlier channels in ascending order."""
    keep: Tensor
    """Integers [C + group_size], with as many bits as the elements: 0 for an outlier channel, else -1. The integers
    repeat after C channels, so that a group that begins at any channel reads a contiguous range."""


SUMMED_ELEMENTS = 2**16
"""Number of elements whose magnitudes a CPU computes at once. So many elements fit into the processor's cache. 1024 x
3072 float32 elements therefore take 0.6 ms and not 11 ms, and no second tensor of the input's size is allocated."""


@torch.no_grad()
def channel_sums(tensor: Tensor) -> Tensor:
    """Return float32 [C]: for each channel (last dimension), the sum of its magnitudes, S_h in the paper's eq. 1."""
    x_RC = tensor.view(rows_and_columns(tuple(tensor.shape)))
    if x_RC.is_cuda:
        from adacc_hf.kernels import outlier_int4_triton

        return outlier_int4_triton.channel_sums(x_RC)
    columns = x_RC.shape[1]
    sums_C = x_RC.new_zeros(columns, dtype=torch.float32)
    for part_RC in x_RC.split(max(1, SUMMED_ELEMENTS // max(1, columns))):
        sums_C += part_RC.abs().sum(0, dtype=torch.float32)
    return sums_C


def zscores(sums_C: Tensor) -> Tensor:
    """Return the Z-score of each channel from `sums_C`, the channels' sums of magnitudes, as float32 [C] (eq. 1). The
    Z-score is the distance of the channel's sum from the mean sum, in standard deviations. Return 0 for all channels if
    all sums are equal."""
    deviation = sums_C.std(correction=0)
    return torch.where(deviation > 0, (sums_C - sums_C.mean()) / deviation, 0.0)


def choose_outliers(sums_C: Tensor, count: int, group_size: int, element_bytes: int) -> Outliers:
    """Return the `count` channels with the largest sums as outliers, without synchronising with the device."""
    channels = sums_C.shape[0]
    indices = sums_C.topk(count).indices.sort().values
    keep = torch.full((channels,), -1, dtype=torch.int16 if element_bytes == 2 else torch.int32, device=sums_C.device)
    keep[indices] = 0
    periodic = torch.arange(channels + group_size, device=sums_C.device) % channels
    return Outliers(channels, indices.int(), keep[periodic])


def encode_ref(x_RC: Tensor, indices: Tensor | None, group_size: int) -> tuple[Tensor, ...]:
    """Encode `x_RC`, R rows of C channels, with plain torch. Return codes uint8 [A/2, G] and 16-bit peaks [A].

    The elements are cut into A groups of G = `group_size` elements, row by row. A is rounded up to an even number,
    because a byte holds two 4-bit codes. The peak of a group is the element with the largest absolute value.

    If `indices` [K] of outlier channels are given, the elements of these channels count as zeros in the groups. In this
    case, also return the outlier channels uncompressed (raw), [R, K], and a copy of the indices.
    """
    raw: tuple[Tensor, ...] = ()
    if indices is not None:
        raw = (x_RC.index_select(1, indices), indices.clone())
        x_RC = torch.where(_channel_mask(indices, x_RC.shape[1]).any(0), 0, x_RC)
    groups = even_groups(x_RC.numel(), group_size)
    x_AG = _symmetric.pad_to(x_RC.reshape(-1), groups * group_size).view(groups, group_size)
    return *_symmetric.encode_ref(x_AG, BITS, FACTOR), *raw


def decode_ref(shape: tuple[int, int], dtype: torch.dtype, codes: Tensor, peaks: Tensor, *raw: Tensor) -> Tensor:
    """Decode the results of `encode_ref` with plain torch. Return a matrix [R, C] of `shape` and `dtype`."""
    rows, columns = shape
    x_AG = _symmetric.decode_ref(codes, peaks, BITS, FACTOR, dtype)
    x_RC = x_AG.view(-1)[: rows * columns].view(rows, columns)
    if not raw:
        return x_RC
    raw_RK, indices = raw
    is_at_KC = _channel_mask(indices, columns)
    return torch.where(is_at_KC.any(0), raw_RK.index_select(1, is_at_KC.int().argmax(0)), x_RC)


def _channel_mask(indices: Tensor, columns: int) -> Tensor:
    """Return a mask [K, C] that is True where column c is the k-th of `indices`."""
    return indices[:, None] == torch.arange(columns, device=indices.device)


def _encode_cpu(x_RC: Tensor, outliers: Outliers | None, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    keep = None if outliers is None else outliers.keep
    _cpu.encode_groups(x_RC.view(-1), codes, peaks, BITS, FACTOR, keep, x_RC.shape[1])
    if outliers is not None:
        raw[1].copy_(outliers.indices)
        _cpu.copy_channels(x_RC, *raw, gather=True)


def _decode_cpu(out_RC: Tensor, codes: Tensor, peaks: Tensor, *raw: Tensor) -> None:
    _cpu.decode_groups(out_RC, codes, peaks, BITS, FACTOR)
    if raw:
        _cpu.copy_channels(out_RC, *raw, gather=False)


@register
class OutlierInt4(GroupCodec):
    """Codec outlier_int4: symmetric INT4 in groups, with `num_outliers` channels stored uncompressed (raw)."""

    name = "outlier_int4"
    suits = frozenset({"linear", "norm", "activation", "other"})
    keeps_outliers = True
    triton = "outlier_int4_triton"
    cpu = Kernels(_encode_cpu, _decode_cpu)
    keeps_rows = True

    def __init__(self, group_size: int = 64, num_outliers: int = 0) -> None:
        super().__init__(group_size)
        if num_outliers < 0:
            raise ValueError(f"codec {self.name!r}: num_outliers={num_outliers} must be 0 or more")
        self.num_outliers = num_outliers
        self.outliers: Outliers | None = None
        """Outlier channels that `fit` has chosen."""

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return super().supports(shape, dtype) and rows_and_columns(shape)[1] >= self.num_outliers

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        groups, (rows, _) = even_groups(prod(shape), self.group_size), rows_and_columns(shape)
        grouped = ((groups // 2, self.group_size), torch.uint8), ((groups,), peak_dtype(dtype))
        raw = ((rows, self.num_outliers), dtype), ((self.num_outliers,), torch.int32)
        return (*grouped, *raw) if self.num_outliers else grouped

    @torch.no_grad()
    def fit(self, tensor: Tensor) -> None:
        """Choose the `num_outliers` channels of `tensor` with the largest sums of absolute values. The device is not
        synchronized."""
        self._require(tensor)
        if self.num_outliers:
            sums_C = channel_sums(tensor)
            self.outliers = choose_outliers(sums_C, self.num_outliers, self.group_size, tensor.element_size())

    def count_outliers(self, tensor: Tensor) -> int:
        return int((zscores(channel_sums(tensor)) > ZSCORE_THRESHOLD).sum())

    def encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        tensors = self._new_tensors(x)
        kernels.encode(x, self._fitted(x), *tensors)
        return tensors

    def _encode_plain(self, x: Tensor) -> tuple[Tensor, ...]:
        outliers = self._fitted(x)
        return encode_ref(x, outliers.indices if outliers else None, self.group_size)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Encode a contiguous tensor in a compiled graph. The outlier channels are chosen from this tensor. The result
        equals `encode` directly after `fit`, bit for bit. Graphs have no state, so `fit` is not used."""
        x_RC = tensor.reshape(rows_and_columns(tuple(tensor.shape)))
        indices = None
        if self.num_outliers:
            sums_C = x_RC.abs().sum(0, dtype=torch.float32)
            indices = sums_C.topk(self.num_outliers).indices.sort().values.int()
        return encode_ref(x_RC, indices, self.group_size)

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return decode_ref(rows_and_columns(size), dtype, *tensors).reshape(size)

    def _fitted(self, tensor: Tensor) -> Outliers | None:
        """Return the outlier channels that `fit` has chosen. If `fit` was not called, choose the channels from
        `tensor`. Return None if `num_outliers` is 0."""
        if not self.num_outliers:
            return None
        if self.outliers is None:
            self.fit(tensor)
        assert self.outliers is not None
        expected = self.outliers.channels, self.outliers.keep.element_size()
        actual = rows_and_columns(tuple(tensor.shape))[1], tensor.element_size()
        if expected != actual:
            raise ValueError(
                f"codec {self.name!r} was fitted to {expected[0]} channels of {expected[1]} bytes per element and got "
                f"{actual[0]} of {actual[1]}: use one codec object per activation, or call fit again"
            )
        return self.outliers
