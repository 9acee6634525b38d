"""What a tracking step measures from what it encodes anyway: outlier channels and round-trip errors (paper, section
3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from adacc_hf.adapt.gradient_check import GradientError
from adacc_hf.artifacts.call_names import numbered
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, get_codec
from adacc_hf.torch_glue.tensors import relative_error

if TYPE_CHECKING:
    from torch import Tensor

    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.profile import CodecOption, Profile, Value

TrackedKey = tuple[int, int]
"""An activation: index of its kind, index of its value."""

OptionKey = tuple[int, int, str]
"""An activation and the name of a codec."""

K = TypeVar("K", bound=tuple[Any, ...])
F = TypeVar("F", bound=float)


@dataclass(frozen=True, kw_only=True)
class NamedObservation:
    """What a tracking step found, by names that the profiles of all sizes of batch have in common.

    Kinds and values are numbered by each profile for itself: where a step calls a block twice, say, it has more kinds.
    A key begins with the name of a block's call and of an activation of it ("attn:clone#2"), or is the block alone.
    """

    num_outliers: dict[tuple[str, str], int]
    errors: dict[tuple[str, str], float]
    option_errors: dict[tuple[str, str, str], float]
    gradients: dict[str, GradientError]
    degrading: frozenset[tuple[str, str, str]]

    @classmethod
    def merged(cls, observations: Sequence[NamedObservation]) -> NamedObservation:
        """The worst of several sizes of batch."""
        return cls(**_worst(observations))

    def within(self, profile: Profile) -> Observation:
        """The observation of the kinds of `profile`, as far as it has the blocks and activations."""
        keys = {
            (block.name, name): (block.kind, value.index)
            for block in profile.blocks
            for value, name in zip(profile.kinds[block.kind].values, profile.kinds[block.kind].names, strict=True)
        }
        kinds = {block.name: block.kind for block in profile.blocks}

        def own(found: dict[Any, F]) -> dict[Any, F]:
            return _most({(*keys[key[:2]], *key[2:]): figure} for key, figure in found.items() if key[:2] in keys)

        gradients: dict[int, list[GradientError]] = {}
        for block, error in self.gradients.items():
            if block in kinds:
                gradients.setdefault(kinds[block], []).append(error)
        return Observation(
            num_outliers=own(self.num_outliers),
            errors=own(self.errors),
            option_errors=own(self.option_errors),
            gradients={kind: GradientError.worst(errors) for kind, errors in sorted(gradients.items())},
            degrading=frozenset((*keys[key[:2]], key[2]) for key in self.degrading if key[:2] in keys),
        )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a tracking step found, the most over all blocks of a kind, all calls and all ranks."""

    num_outliers: dict[TrackedKey, int]
    """Outlier channels of each tracked activation."""
    errors: dict[TrackedKey, float]
    """Relative L2 round-trip error of each activation as it was compressed."""
    option_errors: dict[OptionKey, float]
    """The same for the codecs to choose from; under `max_error` with as many raw channels as were found."""
    gradients: dict[int, GradientError]
    """The worst error of a sampled block's gradient, by kind."""
    degrading: frozenset[OptionKey]
    """Codecs that must not be used as they were, for the gradient's error to keep to its bound."""

    @classmethod
    def merged(cls, observations: Sequence[Observation]) -> Observation:
        """The worst of several ranks."""
        return cls(**_worst(observations))

    def by_name(self, profile: Profile) -> NamedObservation:
        """The same by the names of all blocks and their activations, of the `profile` that numbers them."""
        blocks: dict[int, list[str]] = {}
        for block in profile.blocks:
            blocks.setdefault(block.kind, []).append(block.name)

        def named(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
            kind, value, *codec = key
            return [(block, profile.kinds[kind].names[value], *codec) for block in blocks[kind]]

        def all_named(found: dict[Any, F]) -> dict[Any, F]:
            return {name: figure for key, figure in found.items() for name in named(key)}

        return NamedObservation(
            num_outliers=all_named(self.num_outliers),
            errors=all_named(self.errors),
            option_errors=all_named(self.option_errors),
            gradients={block: error for kind, error in self.gradients.items() for block in blocks[kind]},
            degrading=frozenset(name for key in self.degrading for name in named(key)),
        )


def _worst(observations: Sequence[Any]) -> dict[str, Any]:
    """The fields of several observations that number or name alike, the worst of each."""
    gradients: dict[Any, list[GradientError]] = {}
    for observation in observations:
        for block, error in observation.gradients.items():
            gradients.setdefault(block, []).append(error)
    return {
        "num_outliers": _most(observation.num_outliers for observation in observations),
        "errors": _most(observation.errors for observation in observations),
        "option_errors": _most(observation.option_errors for observation in observations),
        "gradients": {block: GradientError.worst(errors) for block, errors in sorted(gradients.items())},
        "degrading": frozenset().union(*(observation.degrading for observation in observations)),
    }


def _most(findings: Iterable[dict[K, F]]) -> dict[K, F]:
    most: dict[K, F] = {}
    for found in findings:
        for key, figure in found.items():
            most[key] = max(figure, most.get(key, figure))
    return {key: most[key] for key in sorted(most)}


@dataclass(slots=True)
class Findings:
    """What the codecs of a tracking step have measured so far; errors stay on the device until they are read."""

    num_outliers: dict[TrackedKey, int] = field(default_factory=dict)
    errors: dict[TrackedKey, Tensor] = field(default_factory=dict)
    option_errors: dict[OptionKey, Tensor] = field(default_factory=dict)

    def add_count(self, key: TrackedKey, count: int) -> None:
        self.num_outliers[key] = max(count, self.num_outliers.get(key, 0))

    def add_error(self, key: TrackedKey, error: Tensor) -> None:
        _raise_to(self.errors, key, error)

    def add_option_error(self, key: OptionKey, error: Tensor) -> None:
        _raise_to(self.option_errors, key, error)

    def read(self, gradients: dict[int, GradientError], degrading: frozenset[OptionKey]) -> Observation:
        """Synchronises with the device."""
        return Observation(
            num_outliers=dict(self.num_outliers),
            errors={key: float(error) for key, error in self.errors.items()},
            option_errors={key: float(error) for key, error in self.option_errors.items()},
            gradients=gradients,
            degrading=degrading,
        )


def _raise_to(errors: dict[K, Tensor], key: K, error: Tensor) -> None:
    errors[key] = torch.maximum(errors[key], error) if key in errors else error


class MeasuringCodec:
    """A codec that measures what it encodes: outliers are counted and chosen anew, round trips are compared."""

    def __init__(
        self,
        codec: Codec,
        key: TrackedKey,
        options: Sequence[CodecOption],
        config: AdaccConfig,
        findings: Findings,
        tracks: bool,
    ) -> None:
        self._codec = codec
        self._key = key
        self._options = options
        self._config = config
        self._findings = findings
        self._counts = tracks and codec.keeps_outliers and config.outliers

    def encode(self, tensor: Tensor) -> Payload:
        count = None
        if self._counts:
            count = self._codec.count_outliers(tensor, self._config.zscore_threshold)
            self._findings.add_count(self._key, count)
            self._codec.fit(tensor)
        payload = self._codec.encode(tensor)
        if self._config.guard and not self._codec.lossless:
            self._measure(tensor, payload, count)
        return payload

    def decode(self, payload: Payload) -> Tensor:
        return self._codec.decode(payload)

    def _measure(self, tensor: Tensor, payload: Payload, count: int | None) -> None:
        error = relative_error([tensor], [self._codec.decode(payload)])
        self._findings.add_error(self._key, error)
        is_bounded = self._config.max_error is not None
        for option in self._options:
            as_it_is = count in (None, getattr(self._codec, "num_outliers", None)) or not is_bounded
            if option.codec == self._codec.name and as_it_is:
                self._findings.add_option_error((*self._key, option.codec), error)
            elif is_bounded:  # only a bound asks for the errors of what was not used
                other = _refitted(option, count)
                if not other.lossless and other.supports(tuple(tensor.shape), tensor.dtype):
                    other_error = relative_error([tensor], [other.decode(other.encode(tensor))])
                    self._findings.add_option_error((*self._key, option.codec), other_error)


def _refitted(option: CodecOption, count: int | None) -> Codec:
    """The codec of `option`, with `count` raw channels if that was counted; it chooses them when it first encodes."""
    options = dict(option.options)
    if count is not None and codec_type(option.codec).keeps_outliers:
        options["num_outliers"] = count
    return get_codec(option.codec, **options)


def is_tracked(value: Value, config: AdaccConfig) -> bool:
    """Whether the outliers of `value` are counted."""
    patterns = config.tracked_modules
    return patterns is None or any(fnmatch(value.name.partition(":")[0], pattern) for pattern in patterns)


def full_name(profile: Profile, key: TrackedKey) -> str:
    """A name for the activation that no other of the profile has."""
    kind, value = key
    return f"{numbered(kind.block_class for kind in profile.kinds)[kind]}.{profile.kinds[kind].names[value]}"
