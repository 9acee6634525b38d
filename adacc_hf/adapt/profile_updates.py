"""Profiles with new prices, from what was measured while training, and without the codecs that are switched off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from adacc_hf.adapt.outlier_tracking import OptionKey, TrackedKey
from adacc_hf.kernels.codecs import codec_type, get_codec, precise_codec
from adacc_hf.price.codec_selection import make_codec

if TYPE_CHECKING:
    from adacc_hf.artifacts.config import AdaccConfig
    from adacc_hf.artifacts.policy import Choice
    from adacc_hf.artifacts.profile import CodecOption, KindProfile, Profile, Value


FINER_STEPS = 16
"""The precise codec's steps to one of INT4's: four more bits."""


def with_outlier_counts(profile: Profile, counts: Mapping[TrackedKey, int]) -> Profile:
    """`profile` with what keeps outliers of each counted activation priced for as many channels as were found."""

    def reprice(key: TrackedKey, value: Value, option: CodecOption) -> CodecOption:
        if key not in counts or not codec_type(option.codec).keeps_outliers:
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

    def reprice(key: TrackedKey, value: Value, option: CodecOption) -> CodecOption:
        return replace(option, error=errors.get((*key, option.codec), option.error))

    return _with_options(profile, reprice)


def without_codecs(profile: Profile, switched_off: Collection[SwitchedOff]) -> Profile:
    """`profile` without the codecs that are `switched_off`."""
    gone = options_of(profile, switched_off)
    if not gone:
        return profile

    def left(key: TrackedKey, value: Value) -> tuple[CodecOption, ...]:
        return tuple(option for option in value.codecs if (*key, option.codec) not in gone)

    return _with_codecs(profile, left)


def with_finer(profile: Profile, switched_off: Collection[SwitchedOff], config: AdaccConfig) -> Profile:
    """`profile` with the precise codec beside what is `switched_off`, where the settings leave the choice to us.

    It is priced like that until it is used: it reads the same, and writes twice as much.
    """
    gone = options_of(profile, switched_off) if config.codecs is None else frozenset()
    if not gone:
        return profile

    def offered(key: TrackedKey, value: Value) -> tuple[CodecOption, ...]:
        off = next((option for option in value.codecs if (*key, option.codec) in gone), None)
        is_known = any(option.codec == precise_codec() for option in value.codecs)
        return value.codecs if off is None or is_known else (*value.codecs, *_finer(value, off, config))

    return _with_codecs(profile, offered)


def _finer(value: Value, option: CodecOption, config: AdaccConfig) -> Iterator[CodecOption]:
    """The precise codec at the price of `option`, if it suits the value."""
    import torch

    codec, dtype = make_codec(precise_codec(), config, 0), getattr(torch, value.dtype)
    if codec.supports(value.encoded_shape, dtype):
        yield replace(
            option,
            codec=codec.name,
            options=tuple(sorted(codec.options.items())),
            nbytes=codec.predicted_bytes(value.encoded_shape, dtype),
            error=option.error / FINER_STEPS,
        )


def with_more_memory(profile: Profile, extra_bytes: int) -> Profile:
    """`profile` with `extra_bytes` more live from forward to the end of backward: what a measured peak has shown."""
    return profile.with_more_live(extra_bytes, [extra_bytes] * len(profile.blocks), extra_bytes)


def repriced_choice(kind: KindProfile, value: int, choice: Choice) -> Choice:
    """`choice` with its codec's options of today; as it is if that codec is no option any more."""
    options = (option for option in kind.values[value].codecs if option.codec == choice.codec)
    option = next(options, None)
    return choice if option is None else replace(choice, options=option.options)


def _with_options(profile: Profile, reprice: Callable[[TrackedKey, Value, CodecOption], CodecOption]) -> Profile:
    return _with_codecs(profile, lambda key, value: tuple(reprice(key, value, option) for option in value.codecs))


def _with_codecs(profile: Profile, codecs_of: Callable[[TrackedKey, Value], tuple[CodecOption, ...]]) -> Profile:
    def changed(kind_index: int, value: Value) -> Value:
        if not value.codecs:
            return value
        return replace(value, codecs=codecs_of((kind_index, value.index), value))

    kinds = tuple(
        replace(kind, values=tuple(changed(index, value) for value in kind.values))
        for index, kind in enumerate(profile.kinds)
    )
    return replace(profile, kinds=kinds)


# Codecs that are switched off for some activations, under names that batches of all sizes have in common.
#
# The tape of another size may number its values otherwise, or have other ones. What its blocks and modules are called,
# and in which order a module makes what, is the same.

SwitchedOff = tuple[str, str, str]
"""A block, an activation of it ("attn:clone", the second one of that name "attn:clone#2"), and a codec."""


def in_all_blocks(profile: Profile, options: Collection[OptionKey]) -> frozenset[SwitchedOff]:
    """`options` of a kind by their names in each block of that kind."""
    return frozenset(
        (block.name, profile.kinds[kind].names[value], codec)
        for block in profile.blocks
        for kind, value, codec in options
        if kind == block.kind
    )


def options_of(profile: Profile, switched_off: Collection[SwitchedOff]) -> frozenset[OptionKey]:
    """The options of `profile` that are switched off in any block of their kind."""
    found = set()
    for block in profile.blocks if switched_off else ():
        kind = profile.kinds[block.kind]
        for value, name in zip(kind.values, kind.names, strict=True):
            found |= {
                (block.kind, value.index, option.codec)
                for option in value.codecs
                if (block.name, name, option.codec) in switched_off
            }
    return frozenset(found)


def lossy_options(profile: Profile, blocks: Collection[str]) -> frozenset[OptionKey]:
    """All options of the kinds of `blocks` that lose something, and the finer ones that would be offered for them."""
    return frozenset(
        (index, value.index, codec)
        for index in {block.kind for block in profile.blocks if block.name in blocks}
        for value in profile.kinds[index].values
        for option in value.codecs
        if not option.lossless
        for codec in (option.codec, precise_codec())
    )
