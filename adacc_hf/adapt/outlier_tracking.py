"""MeasuringCodec: counts outlier channels and measures round-trip errors in a tracking step of a run.

Only tensors that the policy compresses anyway are measured (paper, section 3.4). Observation: the results of one
tracking step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from adacc_hf.adapt.gradient_check import GradientError
from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, get_codec
from adacc_hf.torch_glue.tensors import double_precision_bytes, relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.kind_profile import CodecOption
    from adacc_hf.artifacts.profile import Profile

TrackedKey = tuple[int, int]
"""Key of an activation in a profile: (index of the kind of block, index of the value in the kind's profile)."""

OptionKey = tuple[int, int, str]
"""Key of a codec of an activation: (index of the kind of block, index of the value, name of the codec)."""

K = TypeVar("K", bound=tuple[Any, ...])
F = TypeVar("F", bound=float)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measurements of a tracking step: maxima over all blocks of a kind (blocks that run the same operators), all calls
    and all ranks.

    The keys of the dicts contain either the indices of one profile, or names: (block call, activation, codec), such as
    ("transformer.h.0", "attn:clone#2", "int8"). Names are the same in the profiles of all batch sizes. Indices may
    differ between profiles, because a profile may have more kinds, for example if a step calls a block twice.
    """

    num_outliers: dict[Any, int]
    """Number of outlier channels of each tracked activation (TrackedKey)."""
    errors: dict[Any, float]
    """Relative L2 round-trip error of each compressed activation (TrackedKey) under the codec that the policy uses."""
    option_errors: dict[Any, float]
    """Relative L2 round-trip errors of all codecs that a policy may use (OptionKey), measured if `max_error` is set.
    Codecs that store outlier channels uncompressed are measured with the number of outlier channels counted in this
    step."""
    gradients: dict[Any, GradientError]
    """Largest error measured in the gradients of sampled blocks, keyed by index of the block's kind or by name of the
    block."""
    degrading_codecs: frozenset[Any]
    """Codecs to switch off, because with them the error of a block's gradient exceeds the allowed bound."""

    @classmethod
    def merged(cls, observations: Sequence[Observation]) -> Observation:
        """Merge the observations of several ranks or batch sizes into their maxima."""
        return cls(
            num_outliers=_tracked_maxima(
                pair for observation in observations for pair in observation.num_outliers.items()
            ),
            errors=_tracked_maxima(pair for observation in observations for pair in observation.errors.items()),
            option_errors=_tracked_maxima(
                pair for observation in observations for pair in observation.option_errors.items()
            ),
            gradients=_worst_errors(pair for observation in observations for pair in observation.gradients.items()),
            degrading_codecs=frozenset().union(*(observation.degrading_codecs for observation in observations)),
        )

    def by_name(self, profile: Profile) -> Observation:
        """Return the measurements with names as keys instead of the indices of `profile`, for all blocks."""
        blocks = [(kind, block.name) for block in profile.blocks for kind in profile.kinds_of(block)]
        return self._with_keys(_tracked_activations(profile), blocks)

    def for_profile(self, profile: Profile) -> Observation:
        """Return the measurements with the indices of `profile` as keys, instead of names.

        Blocks and activations that `profile` lacks are left out.
        """
        blocks = [(block.name, kind) for block in profile.blocks for kind in profile.kinds_of(block)]
        return self._with_keys([(names, numbers) for numbers, names in _tracked_activations(profile)], blocks)

    def _with_keys(self, activations: Iterable[tuple[Any, Any]], blocks: Iterable[tuple[Any, Any]]) -> Observation:
        """Return the measurements with replaced keys. `activations` and `blocks` contain pairs (old key, new key)."""
        new_keys: dict[Any, list[Any]] = {}
        for old, new in (*activations, *blocks):
            new_keys.setdefault(old, []).append(new)

        def renamed(figures: Mapping[Any, F]) -> dict[Any, F]:
            return _tracked_maxima(
                ((*new, *key[2:]), f) for key, f in figures.items() for new in new_keys.get(key[:2], ())
            )

        return Observation(
            num_outliers=renamed(self.num_outliers),
            errors=renamed(self.errors),
            option_errors=renamed(self.option_errors),
            gradients=_worst_errors((new, e) for key, e in self.gradients.items() for new in new_keys.get(key, ())),
            degrading_codecs=frozenset(renamed(dict.fromkeys(self.degrading_codecs, 0))),
        )


def _tracked_activations(profile: Profile) -> Iterator[tuple[TrackedKey, tuple[str, str]]]:
    for block in profile.blocks:
        for index in profile.kinds_of(block):
            kind = profile.kinds[index]
            for value, name in zip(kind.values, kind.names, strict=True):
                yield (index, value.index), (block.name, name)


def _worst_errors(errors: Iterable[tuple[Any, GradientError]]) -> dict[Any, GradientError]:
    by_key: dict[Any, list[GradientError]] = {}
    for key, error in errors:
        by_key.setdefault(key, []).append(error)
    return {key: GradientError.worst(by_key[key]) for key in sorted(by_key)}


def _tracked_maxima(figures: Iterable[tuple[Any, F]]) -> dict[Any, F]:
    maxima: dict[Any, F] = {}
    for key, figure in figures:
        maxima[key] = max(figure, maxima.get(key, figure))
    return {key: maxima[key] for key in sorted(maxima)}


@dataclass(slots=True)
class Measurements:
    """Collected measurements of the codecs in the current tracking step.

    Errors are tensors on the device until the method `read` converts them to floats.
    """

    num_outliers: dict[TrackedKey, int] = field(default_factory=dict)
    errors: dict[TrackedKey, Tensor] = field(default_factory=dict)
    option_errors: dict[OptionKey, Tensor] = field(default_factory=dict)
    unmeasured: set[TrackedKey] = field(default_factory=set)
    """Activations of blocks in which the budget has no room to measure errors."""

    def add_count(self, key: TrackedKey, count: int) -> None:
        """Add a number of outlier channels of an activation. Only the largest number of each activation is kept."""
        self.num_outliers[key] = max(count, self.num_outliers.get(key, 0))

    def add_error(self, key: TrackedKey, error: Tensor) -> None:
        """Add a round-trip error of the codec that an activation uses. Only the largest error of each activation is
        kept."""
        _add_tracked_maximum(self.errors, key, error)

    def add_option_error(self, key: OptionKey, error: Tensor) -> None:
        """Add a round-trip error of a codec that an activation may use. Only the largest error of each codec is
        kept."""
        _add_tracked_maximum(self.option_errors, key, error)

    def read(self, gradients: dict[int, GradientError], degrading_codecs: frozenset[OptionKey]) -> Observation:
        """Return the measurements of this rank as an `Observation`. Synchronizes with the device."""
        return Observation(
            num_outliers=dict(self.num_outliers),
            errors={key: float(error) for key, error in self.errors.items()},
            option_errors={key: float(error) for key, error in self.option_errors.items()},
            gradients=gradients,
            degrading_codecs=degrading_codecs,
        )


def _add_tracked_maximum(errors: dict[K, Tensor], key: K, error: Tensor) -> None:
    errors[key] = torch.maximum(errors[key], error) if key in errors else error


MEASURING_COPIES = 3
"""Copies of an activation that measuring its round-trip errors takes at most: payload, temporaries, decoded tensor."""


class MeasuringCodec:
    """A wrapper of a codec in a tracking step. `encode` also counts outlier channels and measures errors.

    The errors are round-trip errors: the difference after `encode` and `decode`. If measuring takes more than
    `room_bytes`, no error is measured.
    """

    def __init__(
        self,
        codec: Codec,
        key: TrackedKey,
        options: Sequence[CodecOption],
        config: AdaccConfig,
        measurements: Measurements,
        room_bytes: float = math.inf,
    ) -> None:
        self._codec = codec
        self._key = key
        self._options = options
        self._config = config
        self._measurements = measurements
        self._counts = codec.keeps_outliers and config.outliers
        self._room_bytes = room_bytes

    def encode(self, tensor: Tensor) -> Payload:
        count = None
        if self._counts:
            count = self._codec.count_outliers(tensor)
            self._measurements.add_count(self._key, count)
            self._codec.fit(tensor)
        payload = self._codec.encode(tensor)
        if not self._codec.lossless:
            if MEASURING_COPIES * tensor.nbytes + double_precision_bytes(tensor) <= self._room_bytes:
                self._measure(tensor, payload, count)
            else:
                self._measurements.unmeasured.add(self._key)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        return self._codec.decode(payload)

    def _measure(self, tensor: Tensor, payload: Payload, count: int | None) -> None:
        error = relative_error([tensor], [self._codec.decode(payload)])
        self._measurements.add_error(self._key, error)
        is_bounded = self._config.max_error is not None
        for option in self._options:
            is_same_count = count in (None, getattr(self._codec, "num_outliers", None)) or not is_bounded
            if option.codec == encoding_of(self._codec.name) and is_same_count:
                self._measurements.add_option_error((*self._key, option.codec), error)
            elif is_bounded:  # without a bound, the errors of unused codecs are not needed
                other = _refitted_codec(option, count)
                if not other.lossless and other.supports(tuple(tensor.shape), tensor.dtype):
                    other_error = relative_error([tensor], [other.decode(other.encode(tensor))])
                    self._measurements.add_option_error((*self._key, option.codec), other_error)


def _refitted_codec(option: CodecOption, count: int | None) -> Codec:
    """Return a new codec with the name and options of `option`. If `count` is not None, the codec stores this number of
    channels uncompressed."""
    options = dict(option.options)
    if count is not None and codec_type(option.codec).keeps_outliers:
        options["num_outliers"] = count
    return get_codec(option.codec, **options)


def full_name(profile: Profile, key: TrackedKey) -> str:
    """Return the name of an activation, unique in `profile`, such as "GPT2Block.attn:clone#2"."""
    kind, value = key
    return f"{numbered_names(kind.block_class for kind in profile.kinds)[kind]}.{profile.kinds[kind].names[value]}"
