"""MeasuringCodec: counts outlier channels and measures round-trip errors in a tracking step (paper, section 3.4).

Only tensors that the policy compresses anyway are measured. Observation: the measurements of one tracking step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from adacc_hf.adapt.gradient_check import GradientError
from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, get_codec
from adacc_hf.torch_glue.tensors import relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.profile import CodecOption, Profile, Value

TrackedKey = tuple[int, int]
"""An activation: (index of its kind of blocks, index of its value)."""

OptionKey = tuple[int, int, str]
"""An activation and a codec: (index of the kind, index of the value, name of the codec)."""

K = TypeVar("K", bound=tuple[Any, ...])
F = TypeVar("F", bound=float)


@dataclass(frozen=True, kw_only=True)
class NamedObservation:
    """Measurements of a tracking step, with keys that the profiles of all batch sizes share.

    Each profile numbers kinds and values for itself: if a step calls a block twice, for example, it has more kinds.
    Here the keys are names instead: (block call, activation, codec), as ("transformer.h.0", "attn:clone#2", "int8"), or
    the first one or two of these.
    """

    num_outliers: dict[tuple[str, str], int]
    errors: dict[tuple[str, str], float]
    option_errors: dict[tuple[str, str, str], float]
    gradients: dict[str, GradientError]
    degrading_codecs: frozenset[tuple[str, str, str]]

    @classmethod
    def merged(cls, observations: Sequence[NamedObservation]) -> NamedObservation:
        """Return the maxima over several batch sizes."""
        return cls(**_merged_fields(observations))

    def for_profile(self, profile: Profile) -> Observation:
        """Return the measurements with the numbers of `profile`, without blocks and activations that it lacks."""
        keys = {
            (block.name, name): (block.kind, value.index)
            for block in profile.blocks
            for value, name in zip(profile.kinds[block.kind].values, profile.kinds[block.kind].names, strict=True)
        }
        kinds = {block.name: block.kind for block in profile.blocks}

        def numbered_keys(figures: dict[Any, F]) -> dict[Any, F]:
            return _maxima({(*keys[key[:2]], *key[2:]): figure} for key, figure in figures.items() if key[:2] in keys)

        gradients: dict[int, list[GradientError]] = {}
        for block, error in self.gradients.items():
            if block in kinds:
                gradients.setdefault(kinds[block], []).append(error)
        return Observation(
            num_outliers=numbered_keys(self.num_outliers),
            errors=numbered_keys(self.errors),
            option_errors=numbered_keys(self.option_errors),
            gradients={kind: GradientError.worst(errors) for kind, errors in sorted(gradients.items())},
            degrading_codecs=frozenset((*keys[key[:2]], key[2]) for key in self.degrading_codecs if key[:2] in keys),
        )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measurements of a tracking step: maxima over all blocks of a kind, all calls and all ranks."""

    num_outliers: dict[TrackedKey, int]
    """Number of outlier channels of each tracked activation."""
    errors: dict[TrackedKey, float]
    """Relative L2 round-trip error of each compressed activation, with the codec that the policy uses."""
    option_errors: dict[OptionKey, float]
    """Relative L2 round-trip error of codecs that a policy may use. Under `max_error`, outlier codecs are measured with
    the counted number of raw channels."""
    gradients: dict[int, GradientError]
    """Largest error of a sampled block's gradient, by kind."""
    degrading_codecs: frozenset[OptionKey]
    """Codecs to switch off, because their errors put a gradient's error above its bound."""

    @classmethod
    def merged(cls, observations: Sequence[Observation]) -> Observation:
        """Return the maxima over several ranks."""
        return cls(**_merged_fields(observations))

    def by_name(self, profile: Profile) -> NamedObservation:
        """Return the measurements with names instead of the numbers of `profile`, for every block of each kind."""
        blocks: dict[int, list[str]] = {}
        for block in profile.blocks:
            blocks.setdefault(block.kind, []).append(block.name)

        def names_of(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
            kind, value, *codec = key
            return [(block, profile.kinds[kind].names[value], *codec) for block in blocks[kind]]

        def named_keys(figures: dict[Any, F]) -> dict[Any, F]:
            return {name: figure for key, figure in figures.items() for name in names_of(key)}

        return NamedObservation(
            num_outliers=named_keys(self.num_outliers),
            errors=named_keys(self.errors),
            option_errors=named_keys(self.option_errors),
            gradients={block: error for kind, error in self.gradients.items() for block in blocks[kind]},
            degrading_codecs=frozenset(name for key in self.degrading_codecs for name in names_of(key)),
        )


def _merged_fields(observations: Sequence[Any]) -> dict[str, Any]:
    """Merge observations, and return the fields of the result by name.

    Numbers of outliers and errors become their maxima, and gradient errors the worst of each block or kind. Degrading
    codecs are united. `observations` are all of one class, `Observation` or `NamedObservation`.
    """
    gradients: dict[Any, list[GradientError]] = {}
    for observation in observations:
        for block, error in observation.gradients.items():
            gradients.setdefault(block, []).append(error)
    return {
        "num_outliers": _maxima(observation.num_outliers for observation in observations),
        "errors": _maxima(observation.errors for observation in observations),
        "option_errors": _maxima(observation.option_errors for observation in observations),
        "gradients": {block: GradientError.worst(errors) for block, errors in sorted(gradients.items())},
        "degrading_codecs": frozenset().union(*(observation.degrading_codecs for observation in observations)),
    }


def _maxima(mappings: Iterable[dict[K, F]]) -> dict[K, F]:
    """Return the maximum of each key's values, in the order of the keys."""
    maxima: dict[K, F] = {}
    for mapping in mappings:
        for key, figure in mapping.items():
            maxima[key] = max(figure, maxima.get(key, figure))
    return {key: maxima[key] for key in sorted(maxima)}


@dataclass(slots=True)
class Measurements:
    """Measurements of the codecs in the current tracking step. Errors stay on the device until `read`."""

    num_outliers: dict[TrackedKey, int] = field(default_factory=dict)
    errors: dict[TrackedKey, Tensor] = field(default_factory=dict)
    option_errors: dict[OptionKey, Tensor] = field(default_factory=dict)

    def add_count(self, key: TrackedKey, count: int) -> None:
        self.num_outliers[key] = max(count, self.num_outliers.get(key, 0))

    def add_error(self, key: TrackedKey, error: Tensor) -> None:
        _add_maximum(self.errors, key, error)

    def add_option_error(self, key: OptionKey, error: Tensor) -> None:
        _add_maximum(self.option_errors, key, error)

    def read(self, gradients: dict[int, GradientError], degrading_codecs: frozenset[OptionKey]) -> Observation:
        """Return the observation of this rank. Synchronizes with the device."""
        return Observation(
            num_outliers=dict(self.num_outliers),
            errors={key: float(error) for key, error in self.errors.items()},
            option_errors={key: float(error) for key, error in self.option_errors.items()},
            gradients=gradients,
            degrading_codecs=degrading_codecs,
        )


def _add_maximum(errors: dict[K, Tensor], key: K, error: Tensor) -> None:
    errors[key] = torch.maximum(errors[key], error) if key in errors else error


class MeasuringCodec:
    """A wrapper of a codec whose `encode` counts and chooses outlier channels anew, and measures round-trip errors."""

    def __init__(
        self,
        codec: Codec,
        key: TrackedKey,
        options: Sequence[CodecOption],
        config: AdaccConfig,
        measurements: Measurements,
        tracks: bool,
    ) -> None:
        self._codec = codec
        self._key = key
        self._options = options
        self._config = config
        self._measurements = measurements
        self._counts = tracks and codec.keeps_outliers and config.outliers

    def encode(self, tensor: Tensor) -> Payload:
        count = None
        if self._counts:
            count = self._codec.count_outliers(tensor, self._config.zscore_threshold)
            self._measurements.add_count(self._key, count)
            self._codec.fit(tensor)
        payload = self._codec.encode(tensor)
        if self._config.guard and not self._codec.lossless:
            self._measure(tensor, payload, count)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        return self._codec.decode(payload)

    def _measure(self, tensor: Tensor, payload: Payload, count: int | None) -> None:
        error = relative_error([tensor], [self._codec.decode(payload)])
        self._measurements.add_error(self._key, error)
        is_bounded = self._config.max_error is not None
        for option in self._options:
            is_same_count = count in (None, getattr(self._codec, "num_outliers", None)) or not is_bounded
            if option.codec == self._codec.name and is_same_count:
                self._measurements.add_option_error((*self._key, option.codec), error)
            elif is_bounded:  # without a bound, the errors of unused codecs are not needed
                other = _refitted(option, count)
                if not other.lossless and other.supports(tuple(tensor.shape), tensor.dtype):
                    other_error = relative_error([tensor], [other.decode(other.encode(tensor))])
                    self._measurements.add_option_error((*self._key, option.codec), other_error)


def _refitted(option: CodecOption, count: int | None) -> Codec:
    """Return the codec of `option`, with `count` raw channels if not None, chosen in its first `encode`."""
    options = dict(option.options)
    if count is not None and codec_type(option.codec).keeps_outliers:
        options["num_outliers"] = count
    return get_codec(option.codec, **options)


def is_tracked(value: Value, config: AdaccConfig) -> bool:
    """Return True if `tracked_modules` selects `value`, so that its outlier channels are counted."""
    patterns = config.tracked_modules
    return patterns is None or any(fnmatch(value.name.partition(":")[0], pattern) for pattern in patterns)


def full_name(profile: Profile, key: TrackedKey) -> str:
    """Return a name of the activation that is unique in the profile, such as "GPT2Block.attn:clone#2"."""
    kind, value = key
    return f"{numbered_names(kind.block_class for kind in profile.kinds)[kind]}.{profile.kinds[kind].names[value]}"
