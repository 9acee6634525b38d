"""Corrections: what a run has learned about memory, codecs and its budget, applied to the profile of any batch size.

In a tracking step, MeasuringCodec counts outlier channels and measures round-trip errors of the tensors that the policy
compresses (paper, section 3.4). Observation has the results of one tracking step. Blocks and activations go by names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adacc_hf.artifacts.call_names import numbered_names
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile, Value
from adacc_hf.artifacts.policy import Choice
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import Codec, Payload, codec_type, get_codec
from adacc_hf.price.memory_profile import with_missing_bytes
from adacc_hf.torch_glue.batch_shapes import num_elements
from adacc_hf.torch_glue.tensors import double_precision_bytes, relative_error

ActivationName = tuple[str, str]
"""(block call, activation), such as ("transformer.h.0", "attn:clone#2"). The names are the same in the profiles of all
batch sizes. Indices may differ, because another tape may number its values differently or have other values."""
CodecName = tuple[str, str, str]
"""(block call, activation, codec)."""

SWITCHED_OFF = "codecs that degraded gradients were switched off"
"""Reason of a change in the history, and of the comparison of gradients that follows it."""
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
    """Return the name of the activation (kind of block, value), such as "GPT2Block.attn:clone#2"."""
    kind, value = key
    return f"{numbered_names(kind.block_class for kind in profile.kinds)[kind]}.{profile.kinds[kind].names[value]}"


def _with_codecs(profile: Profile, codecs_of: Callable[[tuple[int, int], Value], tuple[CodecOption, ...]]) -> Profile:
    kinds = tuple(
        replace(
            kind,
            values=tuple(
                replace(value, codecs=codecs_of((index, value.index), value)) if value.codecs else value
                for value in kind.values
            ),
        )
        for index, kind in enumerate(profile.kinds)
    )
    return replace(profile, kinds=kinds)


def _with_measurements(
    profile: Profile, counts: Mapping[tuple[int, int], int], errors: Mapping[tuple[int, int, str], float]
) -> Profile:
    """Return `profile` with the measured errors of codecs, and with new payload sizes for the codecs that store
    outliers: `counts` contains the number of outlier channels of each activation."""

    def repriced(key: tuple[int, int], value: Value, option: CodecOption) -> CodecOption:
        option = replace(option, error=errors.get((*key, option.codec), option.error))
        if key not in counts or not codec_type(option.codec).keeps_outliers:
            return option
        codec = get_codec(option.codec, **(dict(option.options) | {"num_outliers": counts[key]}))
        nbytes = codec.predicted_bytes(value.encoded_shape, getattr(torch, value.dtype))
        return replace(option, options=tuple(sorted(codec.options.items())), nbytes=nbytes)

    return _with_codecs(profile, lambda key, value: tuple(repriced(key, value, option) for option in value.codecs))


def without_codecs(profile: Profile, switched_off: Collection[CodecName]) -> Profile:
    """Return `profile` without the codecs that are `switched_off`."""
    off = by_index(profile, dict.fromkeys(switched_off, 0))
    return _with_codecs(profile, lambda key, value: tuple(o for o in value.codecs if (*key, o.codec) not in off))


def with_static_memory(profile: Profile, extra_bytes: int) -> Profile:
    """Return `profile` with `extra_bytes` more bytes that are live throughout training, such as optimizer state."""
    at_blocks = [extra_bytes] * len(profile.blocks)
    more = profile.with_extra_live_bytes(extra_bytes, extra_bytes, at_blocks, extra_bytes)
    peak = profile.optimizer_peak_bytes + extra_bytes if profile.optimizer_peak_bytes else 0
    return replace(more, static_bytes=profile.static_bytes + extra_bytes, optimizer_peak_bytes=peak)


def repriced_choice(kind: KindProfile, value: int, choice: Choice) -> Choice:
    """Return `choice` for `value` with its codec's options in `kind`, or unchanged if its codec is no option now."""
    option = next((option for option in kind.codec_options(value) if option.codec == choice.codec), None)
    return choice if option is None else replace(choice, options=option.options)


@dataclass
class Corrections:
    """Corrections of a run's predictions, the same for all batch sizes. Blocks and activations go by their names."""

    config: AdaccConfig
    tightened: float | int | None = None
    """Smaller budget, after a step ran out of memory. None if no step has run out of memory."""
    switched_off: frozenset[CodecName] = frozenset()
    """Codecs that degraded gradients. No policy uses them."""
    num_outliers: dict[tuple[str, str], int] = field(default_factory=dict)
    """Outlier channels at the latest tracking step, by (block, activation)."""
    errors: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Round-trip errors at the latest tracking step, by (block, activation, codec)."""
    missing_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by which measured steps exceeded their predictions, by part of the step, such as a block's backward."""
    counted_elements: int = 0
    """Number of elements of the batch that `missing_bytes` belong to, or 0 before a step was measured."""
    static_bytes: int = 0
    """Bytes that live throughout training since the profile, such as the optimizer's state."""
    version: int = 0
    """Number of changes so far. A policy whose version is lower has to be compared with the budget again."""
    reason: str = ""
    """The latest change, for the history."""

    @property
    def memory_budget(self) -> str | float | int:
        """Budget of policies: the config's, or a smaller one after a step ran out of memory."""
        return self.config.memory_budget if self.tightened is None else self.tightened

    def changed(self, reason: str) -> None:
        """Let all policies be compared with the budget again, because of `reason`."""
        self.version += 1
        self.reason = reason

    def tighten(self, memory_budget: float | int) -> None:
        """Set a smaller budget, because a step ran out of memory."""
        self.tightened = memory_budget
        self.changed("memory ran out")

    def switch_off(self, codecs: Iterable[CodecName]) -> None:
        """Exclude `codecs` from policies."""
        more = self.switched_off | frozenset(codecs)
        if more != self.switched_off:
            self.switched_off = more
            self.changed(SWITCHED_OFF)

    def observe(self, observed: Observation) -> None:
        """Take over the outlier channels and errors of a tracking step."""
        counts, errors = self.num_outliers | observed.num_outliers, self.errors | observed.errors
        if (counts, errors) != (self.num_outliers, self.errors):
            self.num_outliers, self.errors = counts, errors
            self.changed("outlier channels or errors changed")

    def add_missing(self, excess: Mapping[str, int], elements: int, reason: str) -> None:
        """Add the bytes by which a step, whose batch had `elements`, exceeded its prediction, by part of the step."""
        ratio = self._ratio(elements)
        before = {moment: int(nbytes * ratio) for moment, nbytes in self.missing_bytes.items()}
        self.missing_bytes = {m: before.get(m, 0) + excess.get(m, 0) for m in {**before, **excess}}
        self.counted_elements = max(elements, self.counted_elements)
        self.changed(reason)

    def _ratio(self, elements: int) -> float:
        """Return the factor of `missing_bytes` for a batch of `elements`. What does not grow with the batch would be
        too low for a smaller one, so that the factor is at least 1."""
        return max(1.0, elements / self.counted_elements) if self.counted_elements else 1.0

    def applied(self, profile: Profile, shapes: Shapes | None) -> Profile:
        """Return the `profile` of batches of `shapes` (None if unknown) with all corrections, without switched-off
        codecs, and without codecs for values below `min_compress_bytes`."""
        ratio = self._ratio(num_elements(shapes or ()))
        missing = {moment: int(nbytes * ratio) for moment, nbytes in self.missing_bytes.items()}
        corrected = with_missing_bytes(profile, missing) if any(missing.values()) else profile
        corrected = with_static_memory(corrected, self.static_bytes) if self.static_bytes else corrected
        if self.num_outliers or self.errors:
            counts, errors = (by_index(corrected, figures) for figures in (self.num_outliers, self.errors))
            corrected = _with_measurements(corrected, counts, errors)
        corrected = without_codecs(corrected, self.switched_off) if self.switched_off else corrected
        return corrected.without_codecs_below(self.config.min_compress_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON record of the corrections, for a checkpoint."""
        return {
            "tightened": self.tightened,
            "switched_off": sorted(map(list, self.switched_off)),
            "num_outliers": [[*name, count] for name, count in self.num_outliers.items()],
            "errors": [[*name, error] for name, error in self.errors.items()],
            "missing_bytes": self.missing_bytes,
            "counted_elements": self.counted_elements,
        }

    @classmethod
    def from_json(cls, config: AdaccConfig, record: Mapping[str, Any]) -> Corrections:
        """Return the corrections in a checkpoint's `record`. Static bytes are part of a new profile."""
        return cls(
            config,
            tightened=record["tightened"],
            switched_off=frozenset((block, name, codec) for block, name, codec in record["switched_off"]),
            num_outliers={(block, name): count for block, name, count in record["num_outliers"]},
            errors={(block, name, codec): error for block, name, codec, error in record["errors"]},
            missing_bytes=dict(record["missing_bytes"]),
            counted_elements=record["counted_elements"],
        )
