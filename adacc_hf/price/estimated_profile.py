"""The profile of a batch, estimated from the profiles of smaller batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import NoEstimateError, UncalledBlocksError
from adacc_hf.artifacts.kind_profile import CodecOption, Value
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes, profile_structure, size_dependent_numbers
from adacc_hf.artifacts.step_time import plain_blocks_ms
from adacc_hf.artifacts.units import parse_bytes
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.batch_subsampling import (
    UNSUPPORTED_BATCH_ERRORS,
    Batch,
    is_encoder_decoder,
    move_media_first,
    small_parts,
)
from adacc_hf.price.caching_measurement import CachingMeasurement
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.profile_cache import ProfileCache
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.torch_glue.batch_shapes import num_elements
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.progress import announce

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

    Raises NoEstimateError if the batch is too small to be divided, and the errors of `profile_model`.
    """
    whole = Batch(batch)
    step = step or TrainingStep()
    choices = small_parts(*move_media_first(model, whole), is_encoder_decoder(model))
    if not choices:
        raise NoEstimateError("the batch has fewer than four samples, and no texts that can be shortened")
    measurement = measurement or CachingMeasurement(ProfileCache())
    limit = peak_limit(config)
    if limit is not None:
        choices = start_small(choices, whole)
        limit += step.coming_bytes(model.parameters())  # profiles include this state, which does not exist yet
    profiles: list[Profile] = []
    for index, parts in enumerate(choices):
        # Scale the threshold: an activation that is large enough for a codec in the batch is smaller in its parts.
        token_share = num_elements(parts[0].shapes) / num_elements(whole.shapes)
        part_config = replace(
            config.for_rows(whole.num_tokens), min_compress_bytes=int(config.min_compress_bytes * token_share)
        )
        try:
            started = time.perf_counter()
            profiles = [measure_profile(model, parts[0], part_config, step, measurement)]
            if limit is not None:
                parts = parts_within(limit, profiles[0], choices[index:])
            seconds, num_steps = predict_duration(parts, whole, profiles[0], time.perf_counter() - started)
            announce("Adacc: %s", describe_duration(len(parts), seconds, num_steps))
            for part in parts[1:]:
                reading = MemoryOnlyMeasurement(measurement)
                profiles.append(measure_profile(model, part, part_config, step, reading))
        except UncalledBlocksError:
            raise
        except Exception as error:
            is_last = index == len(choices) - 1
            if is_last or not (is_out_of_memory(error) or isinstance(error, UNSUPPORTED_BATCH_ERRORS)):
                raise
            continue
        if all(profile_structure(profile) == profile_structure(profiles[0]) for profile in profiles):
            break
    else:
        raise NoEstimateError("the model runs different operators on different numbers of samples")
    measured = tuple(
        (part.sizes, tuple(size_dependent_numbers(profile))) for part, profile in zip(parts, profiles, strict=True)
    )
    estimate = resize_profile(replace(profiles[0], measured=measured), whole.sizes)
    estimated_numbers = tuple(size_dependent_numbers(estimate))
    return replace(estimate, measured=((whole.sizes, estimated_numbers), *measured))


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


# Memory that profiling takes, and the parts of a batch that can be profiled within a budget in bytes.


def peak_limit(config: AdaccConfig) -> int | None:
    """Return the bytes that the peak of a step may take, or None if the budget is not a number of bytes.

    With the budget "auto", profiling may use all memory of the device, and fails with an error if this is not enough.
    """
    budget = config.memory_budget
    if isinstance(budget, float) or budget == "auto":
        return None
    return parse_bytes(budget, "memory_budget") if isinstance(budget, str) else budget


FIRST_SHARE = 0.25
"""Largest share of the batch's elements in the first profiled part, if the budget is a number of bytes. Nothing
predicts the memory of the first part. Up to this share, the first part of T5, GPT-2 and LLaMA takes less than the least
peak that any policy reaches on the whole batch."""


def start_small(choices: Sequence[Sequence[Batch]], whole: Batch) -> list[list[Batch]]:
    """Return copies of the lists in `choices` that begin with a small part of the batch `whole`.

    Each list contains parts of the batch, to be profiled one after the other. If the first part has more than
    `FIRST_SHARE` of the batch's elements, this part is replaced by the smallest first part of all lists, even if that
    part is too large as well.
    """
    smallest = min((parts[0] for parts in choices), key=lambda part: num_elements(part.shapes))
    limit = FIRST_SHARE * num_elements(whole.shapes)
    return [list(parts) if num_elements(parts[0].shapes) <= limit else [smallest, *parts[1:]] for parts in choices]


def parts_within(limit: int, first: Profile, choices: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Return the parts of the batch (some samples, with some of their tokens) to profile. Each list in `choices`
    contains alternative parts.

    The part `choices[0][0]` was profiled before, with the result `first`, and is always the first part returned. The
    other parts come from one of the lists: the first list in which each part is predicted to take at most `limit` bytes
    to profile. If there is no such list, they come from the last list.
    """
    profiled = choices[0][0]
    for parts in choices:
        others = [part for part in parts if part.shapes != profiled.shapes]
        if parts is choices[-1] or all(profiling_bytes(first, profiled, part) <= limit for part in others):
            break
    return [profiled, *others]


def profiling_bytes(profile: Profile, part: Batch, other: Batch) -> int:
    """Predict the peak of memory while the batch `other` is profiled without timing.

    `profile` is the profile of the batch `part`. Its byte counts are scaled by the growth from `part` to `other`. The
    peak occurs either while a block is recorded, which keeps all values of the block alive, or while memory is
    measured. The measurement recomputes all blocks but one, which retains its activations.

    The prediction may be too high, for two reasons: a dimension that equals a sequence length only by chance is scaled
    like this length, and the gradients of parameters are scaled like activations.
    """
    growth = _Growth.between(part, other)
    static_bytes = profile.static_bytes
    bases = [block.forward_base_bytes - static_bytes for block in profile.blocks]
    recorded = max(sum(growth.bytes_of(v) for v in kind.values if _is_computed(v)) for kind in profile.kinds)
    retained = max(sum(growth.bytes_of(v) for v in kind.activations if v.saved) for kind in profile.kinds)
    recomputed = simulate(profile, [recompute_plan(profile.kind_of(block)) for block in profile.blocks]).peak_bytes
    return static_bytes + max(
        int(growth.linear * max(bases)) + recorded,
        int(growth.linear * (recomputed - static_bytes)) + retained,
    )


def _is_computed(value: Value) -> bool:
    return value.producer is not None and value.shared is None


@dataclass(frozen=True)
class _Growth:
    """Growth from a first, profiled part of a batch to a second part: sizes in the second part, divided by sizes in the
    first. A part contains some of the batch's samples, and some of the tokens of each sample."""

    samples: float
    """Number of samples in the second part, divided by the number in the first part."""
    lengths: Mapping[int, float]
    """Ratio of sequence lengths (second part divided by first part), by the length in the first part."""

    @classmethod
    def between(cls, part: Batch, other: Batch) -> _Growth:
        lengths: dict[int, float] = {}
        for before, after in zip(part.shapes, other.shapes, strict=True):
            if len(before.size) == 2:
                length = before.size[1]
                lengths[length] = max(lengths.get(length, 0.0), after.size[1] / length)
        return cls(other.num_samples / part.num_samples, lengths)

    @property
    def linear(self) -> float:
        """Largest factor, at least 1, by which the bytes of a value grow from the first part of the batch to the
        second, if one of the value's dimensions is the length of a sequence."""
        return max(1.0, self.samples * max(self.lengths.values(), default=1.0))

    def bytes_of(self, value: Value) -> int:
        """Predict the bytes of the profiled `value` if the second part of the batch is run.

        Every dimension that equals a sequence length of the first part is scaled. Attention's scores have two such
        dimensions. If no dimension equals a sequence length, the bytes are scaled by the largest factor (`linear`).
        """
        ratios = [self.lengths[size] for size in value.shape if size in self.lengths]
        return int(value.nbytes * (max(1.0, self.samples * prod(ratios)) if ratios else self.linear))
