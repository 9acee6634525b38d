"""Profiles with new prices, from what was measured while training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from adacc_hf.kernels.codecs import get_codec
from adacc_hf.tracking.tracking import OUTLIER_CODEC, Key, OptionKey

if TYPE_CHECKING:
    from adacc_hf.policy import Choice
    from adacc_hf.profile import CodecOption, KindProfile, Profile, Value


def with_outliers(profile: Profile, counts: Mapping[Key, int]) -> Profile:
    """`profile` with the outlier codec of each counted activation priced for as many channels as were found."""

    def reprice(key: Key, value: Value, option: CodecOption) -> CodecOption:
        if option.codec != OUTLIER_CODEC or key not in counts:
            return option
        return _with_channels(value, option, counts[key])

    return _with_options(profile, reprice)


def _with_channels(value: Value, option: CodecOption, count: int) -> CodecOption:
    import torch

    codec = get_codec(option.codec, **(dict(option.options) | {"num_outliers": count}))
    nbytes = codec.predicted_bytes(value.encoded_shape, getattr(torch, value.dtype))
    return replace(option, options=tuple(sorted(codec.options.items())), nbytes=nbytes)


def with_errors(profile: Profile, errors: Mapping[OptionKey, float]) -> Profile:
    """`profile` with the codec errors that were measured."""

    def reprice(key: Key, value: Value, option: CodecOption) -> CodecOption:
        return replace(option, error=errors.get((*key, option.codec), option.error))

    return _with_options(profile, reprice)


def without_lossy(profile: Profile, blocks: Collection[str]) -> Profile:
    """`profile` with lossless codecs alone for the kinds of `blocks`."""
    exact = {block.kind for block in profile.blocks if block.name in blocks}
    kinds = tuple(_lossless(kind) if index in exact else kind for index, kind in enumerate(profile.kinds))
    return replace(profile, kinds=kinds) if exact else profile


def _lossless(kind: KindProfile) -> KindProfile:
    values = tuple(replace(v, codecs=tuple(o for o in v.codecs if o.lossless)) for v in kind.values)
    return replace(kind, values=values)


def with_more_memory(profile: Profile, extra_bytes: int) -> Profile:
    """`profile` with `extra_bytes` more live from forward to the end of backward: what a measured peak has shown."""
    return profile.with_more_live(extra_bytes, [extra_bytes] * len(profile.blocks), extra_bytes)


def repriced_choice(kind: KindProfile, value: int, choice: Choice) -> Choice:
    """`choice` with its codec's options of today; as it is if that codec is no option any more."""
    options = (option for option in kind.values[value].codecs if option.codec == choice.codec)
    option = next(options, None)
    return choice if option is None else replace(choice, options=option.options)


def _with_options(profile: Profile, reprice: Callable[[Key, Value, CodecOption], CodecOption]) -> Profile:
    def repriced(kind_index: int, value: Value) -> Value:
        if not value.codecs:
            return value
        key = (kind_index, value.index)
        return replace(value, codecs=tuple(reprice(key, value, option) for option in value.codecs))

    kinds = tuple(
        replace(kind, values=tuple(repriced(index, value) for value in kind.values))
        for index, kind in enumerate(profile.kinds)
    )
    return replace(profile, kinds=kinds)
