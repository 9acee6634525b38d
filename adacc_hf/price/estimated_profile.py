"""The profile of a batch, estimated from the profiles of smaller batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import NoEstimateError, UncalledBlocksError
from adacc_hf.artifacts.kind_profile import CodecOption, Value
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes, profile_structure, size_dependent_numbers
from adacc_hf.artifacts.step_time import plain_blocks_ms
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.batch_subsampling import (
    Batch,
    is_encoder_decoder,
    move_media_first,
    small_parts,
)
from adacc_hf.price.caching_measurement import CachingMeasurement
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.profile_cache import ProfileCache
from adacc_hf.price.profiling_memory import parts_within, peak_limit, profiling_bytes, start_small
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.torch_glue.batch_shapes import num_elements
from adacc_hf.torch_glue.distributed import (
    broadcast_from_first_rank,
    common_profile,
    gather_from_all_ranks,
    is_sharded,
)
from adacc_hf.torch_glue.progress import announce

log = logging.getLogger(__name__)

RECORDING_PASSES = 1.5
"""Time to record a part of the batch and to measure its forward's memory, as a multiple of the time of one forward and
backward of the part."""


def estimate_profile(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig,
    step: TrainingStep | None = None,
    measurement: Measurement | None = None,
) -> Profile:
    """Estimate the profile of `batch` from the profiles of a few small parts of the batch.

    Times and codec costs are measured on the smallest part, because recording and timing together take the most memory.
    Times are scaled by the bytes that operators access, and gradient errors of codecs are taken unchanged. Bytes are
    extrapolated by `Profile.sizes`. If a part does not fit into memory, or is predicted to exceed a budget in bytes,
    smaller parts are profiled instead.

    All ranks of a model with sharded parameters must call this function with batches of the same sizes. They profile
    the same parts, and an error ends the estimate, because the other ranks may be waiting.

    Raises NoEstimateError if the batch is too small to be divided, and the errors of `profile_model`.
    """
    whole, shards = Batch(batch), is_sharded(model)
    step = step or TrainingStep()
    choices = small_parts(*move_media_first(model, whole), is_encoder_decoder(model))
    if not choices:
        raise NoEstimateError("the batch has fewer than four samples, and no texts that can be shortened")
    measurement = measurement or CachingMeasurement(ProfileCache())
    limit = peak_limit(config)
    if limit is not None:
        choices = start_small(choices, whole)
        limit += step.optimizer_state_bytes  # profiles include this state, which does not exist yet
        limit = broadcast_from_first_rank(lambda: limit) if shards else limit
    profiles: list[Profile] = []
    for index, parts in enumerate(choices):
        # Scale the threshold: an activation that is large enough for a codec in the batch is smaller in its parts.
        token_share = parts[0].share_of(whole)
        part_config = replace(
            config.for_rows(whole.num_tokens), min_compress_bytes=int(config.min_compress_bytes * token_share)
        )
        try:
            started = time.perf_counter()
            profiles = [measure_profile(model, parts[0], part_config, step, measurement)]
            first = profiles[0]
            if limit is not None:
                first = common_profile(first) if shards else first
                parts = parts_within(limit, first, choices[index:])
                _warn_above(limit, max(profiling_bytes(first, parts[0], part) for part in parts), config)
            seconds, num_steps = predict_duration(parts, whole, profiles[0], time.perf_counter() - started)
            announce("Adacc: %s", describe_duration(len(parts), seconds, num_steps))
            for part in parts[1:]:
                reading = MemoryOnlyMeasurement(measurement)
                profiles.append(measure_profile(model, part, part_config, step, reading))
        except UncalledBlocksError:
            raise
        except Exception:
            is_last = index == len(choices) - 1
            if shards or is_last:
                raise
            continue
        has_one_structure = all(profile_structure(profile) == profile_structure(profiles[0]) for profile in profiles)
        if all(gather_from_all_ranks(has_one_structure)) if shards else has_one_structure:
            break
    else:
        raise NoEstimateError("the model runs different operators on different numbers of samples")
    measured = tuple(
        (part.sizes, tuple(size_dependent_numbers(profile))) for part, profile in zip(parts, profiles, strict=True)
    )
    estimate = resize_profile(replace(profiles[0], measured=measured), whole.sizes)
    estimated_numbers = tuple(size_dependent_numbers(estimate))
    return replace(estimate, measured=((whole.sizes, estimated_numbers), *measured))


def _warn_above(limit: int, nbytes: int, config: AdaccConfig) -> None:
    """Warn if profiling the parts of the batch is predicted to take `nbytes` bytes, more than the `limit`, because the
    batch has no smaller parts."""
    excess = nbytes - limit
    if excess > 0:
        log.warning(
            "Adacc: profiling parts of the first batch is predicted to take up to %d bytes (%s) more than "
            "memory_budget=%r allows, because the batch has no smaller parts: to avoid this, set a larger "
            "memory_budget, or a fraction such as 0.5",
            excess,
            format_bytes(excess),
            config.memory_budget,
        )


def predict_duration(parts: Sequence[Batch], whole: Batch, first: Profile, first_seconds: float) -> tuple[float, float]:
    """Predict the time to profile `parts`. Return (seconds, number of plain steps on the batch `whole` that take as
    long).

    `first` is the profile of the first part, and `first_seconds` the time that it took. The times of a profiled step
    and of a plain step in `first` are scaled by the numbers of elements. A profiled step takes longer than a plain
    step, because it recomputes and its memory is recorded. The number of steps is 0.0 if the profile has no times.
    """
    ms_per_element = first.step_ms / num_elements(parts[0].shapes)
    num_passes = RECORDING_PASSES + 1 + len(first.other_heads)
    rest_elements = sum(num_elements(part.shapes) for part in parts[1:])
    seconds = first_seconds + 1e-3 * ms_per_element * num_passes * rest_elements
    plain_ms = (plain_blocks_ms(first) + first.head_ms) * num_elements(whole.shapes) / num_elements(parts[0].shapes)
    return seconds, 1e3 * seconds / plain_ms if plain_ms else 0.0


def describe_duration(num_parts: int, seconds: float, num_steps: float) -> str:
    """Return the message on the predicted time of profiling `num_parts` parts. It is shown after the first part is
    profiled."""
    duration = f"profiling takes about {seconds:.1f} s in all"
    steps = f", as long as about {max(1, round(num_steps))} plain steps on this batch" if num_steps else ""
    return f"{duration}{steps} (estimated after 1 of {num_parts} small parts of the batch)"


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
    """Yield the codec options of `before`, a profiled value, that also support `after`, the same value at the new
    size."""
    dtype = getattr(torch, after.dtype)
    ratio = after.nbytes / before.nbytes if before.nbytes else 1.0
    for option in after.codecs:
        codec = get_codec(option.codec, **dict(option.options))
        if codec.supports(after.encoded_shape, dtype):
            nbytes = codec.predicted_bytes(after.encoded_shape, dtype)
            encode_ms, decode_ms = option.encode_ms * ratio, option.decode_ms * ratio
            yield replace(option, nbytes=nbytes, encode_ms=encode_ms, decode_ms=decode_ms)
