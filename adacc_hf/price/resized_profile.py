"""The profile of a batch of another size, predicted by a profile's size model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from adacc_hf.artifacts.kind_profile import CodecOption, Value
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.kernels.codecs import get_codec


def resize_profile(profile: Profile, shapes: Shapes) -> Profile:
    """Predict the profile of batches of `shapes` from `profile`. Leave out codecs that do not support the new sizes.

    The profile must be valid for batches of these shapes: `profile.sizes.size_class` must find a size class.
    """
    assert profile.sizes is not None
    resized_profile = profile.sizes.profile_at(profile, shapes)
    if resized_profile is profile:
        return profile
    kinds = []
    for before, after in zip(profile.kinds, resized_profile.kinds, strict=True):
        pairs = zip(before.values, after.values, strict=True)
        values = (replace(v, codecs=tuple(_resized_codecs(old, v))) if v.codecs else v for old, v in pairs)
        kinds.append(replace(after, values=tuple(values)))
    return replace(resized_profile, kinds=tuple(kinds))


def _resized_codecs(before: Value, after: Value) -> Iterator[CodecOption]:
    """Yield the codec options of `before` that also support `after`, the same value at the new size."""
    dtype = getattr(torch, after.dtype)
    ratio = after.nbytes / before.nbytes if before.nbytes else 1.0
    for option in after.codecs:
        codec = get_codec(option.codec, **dict(option.options))
        if codec.supports(after.encoded_shape, dtype):
            nbytes = codec.predicted_bytes(after.encoded_shape, dtype)
            encode_ms, decode_ms = option.encode_ms * ratio, option.decode_ms * ratio
            yield replace(option, nbytes=nbytes, encode_ms=encode_ms, decode_ms=decode_ms)
