"""MeasuringCodec: counts outlier channels and measures round-trip errors in a tracking step of a run.

Only tensors that the policy compresses anyway are measured (paper, section 3.4). Observation: the results of one
tracking step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, get_codec
from adacc_hf.torch_glue.tensors import double_precision_bytes, relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import CodecOption
    from adacc_hf.artifacts.profile import Profile

ActivationName = tuple[str, str]
"""(block call, activation), such as ("transformer.h.0", "attn:clone#2"). The names are the same in the profiles of all
batch sizes. Indices may differ, because another tape may number its values differently or have other values."""
CodecName = tuple[str, str, str]
"""(block call, activation, codec)."""

MEASURING_COPIES = 3
"""Copies of an activation that measuring its round-trip errors takes at most: payload, temporaries, decoded tensor."""


@dataclass(kw_only=True)
class Observation:
    """Measurements of a tracking step: maxima over all calls of a block and, if merged, over all ranks and sizes."""

    num_outliers: dict[ActivationName, int] = field(default_factory=dict)
    """Number of outlier channels."""
    errors: dict[CodecName, Any] = field(default_factory=dict)
    """Relative L2 round-trip error of the codec in use and, if `max_error` is set, of all codecs that a policy may use,
    with the number of outlier channels counted in this step. Tensors on the device until `read`."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Error of the gradient of each sampled block (`gradient_check.gradient_error`)."""
    degrading_codecs: set[CodecName] = field(default_factory=set)
    """Codecs to switch off, because with them the error of a block's gradient exceeds the allowed bound."""

    def read(self) -> None:
        """Convert the errors to floats, which synchronizes with the device."""
        self.errors = {key: float(error) for key, error in self.errors.items()}

    @classmethod
    def merged(cls, observations: Iterable[Observation]) -> Observation:
        """Merge the observations of several ranks or batch sizes into their maxima."""
        merged = cls()
        for each in observations:
            for name in ("num_outliers", "errors", "gradients"):
                figures = getattr(merged, name)
                for key, figure in getattr(each, name).items():
                    figures[key] = max(figure, figures.get(key, figure))
            merged.degrading_codecs |= each.degrading_codecs
        return merged


def by_index(profile: Profile, figures: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `figures` with the keys (kind of block, value, ...) of `profile` in place of (block, activation, ...): the
    largest figure of all blocks of a kind. Blocks and activations that `profile` lacks are left out."""
    keys: dict[ActivationName, list[tuple[int, int]]] = {}
    for block in profile.blocks if figures else ():
        for index in profile.kinds_of(block):
            kind = profile.kinds[index]
            for value, name in zip(kind.values, kind.names, strict=True):
                keys.setdefault((block.name, name), []).append((index, value.index))
    found: dict[Any, Any] = {}
    for name, figure in figures.items():
        for numbers in keys.get(name[:2], ()):
            key = (*numbers, *name[2:])
            found[key] = max(figure, found.get(key, figure))
    return found


class MeasuringCodec:
    """A wrapper of the codec of one activation in a tracking step. `encode` also counts outlier channels and measures
    the errors of `encode` and `decode`. If measuring takes more than `room_bytes`, no error is measured."""

    def __init__(
        self,
        codec: Codec,
        name: ActivationName,
        options: Sequence[CodecOption],
        config: AdaccConfig,
        observation: Observation,
        room_bytes: float = math.inf,
    ) -> None:
        self._codec, self._name, self._options = codec, name, options
        self._observation = observation
        self._counts = codec.keeps_outliers and config.outliers
        self._is_bounded = config.max_error is not None
        self._room_bytes = room_bytes

    def encode(self, tensor: Tensor) -> Payload:
        count = None
        if self._counts:
            count, counts = self._codec.count_outliers(tensor), self._observation.num_outliers
            counts[self._name] = max(count, counts.get(self._name, 0))
            self._codec.fit(tensor)
        payload = self._codec.encode(tensor)
        measuring_bytes = MEASURING_COPIES * tensor.nbytes + double_precision_bytes(tensor)
        if not self._codec.lossless and measuring_bytes <= self._room_bytes:
            self._measure(tensor, payload, count)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        return self._codec.decode(payload)

    def _measure(self, tensor: Tensor, payload: Payload, count: int | None) -> None:
        own, options = encoding_of(self._codec.name), self._options
        if not self._is_bounded or count in (None, getattr(self._codec, "num_outliers", None)):
            self._add(own, relative_error([tensor], [self._codec.decode(payload)]))
            options = [option for option in options if option.codec != own]
        for option in options if self._is_bounded else ():  # without a bound, the other codecs' errors are not needed
            settings = dict(option.options)
            if count is not None and codec_type(option.codec).keeps_outliers:
                settings["num_outliers"] = count
            codec = get_codec(option.codec, **settings)
            if not codec.lossless and codec.supports(tuple(tensor.shape), tensor.dtype):
                self._add(option.codec, relative_error([tensor], [codec.decode(codec.encode(tensor))]))

    def _add(self, codec: str, error: Tensor) -> None:
        errors, key = self._observation.errors, (*self._name, codec)
        errors[key] = torch.maximum(errors[key], error) if key in errors else error


def full_name(profile: Profile, key: tuple[int, int]) -> str:
    """Return the name of the activation (kind of block, value), unique in `profile`, such as
    "GPT2Block.attn:clone#2"."""
    kind, value = key
    return f"{numbered_names(kind.block_class for kind in profile.kinds)[kind]}.{profile.kinds[kind].names[value]}"
