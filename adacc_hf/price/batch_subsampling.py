"""Parts of the profiled batch, on which blocks are recorded and memory is measured. Tapes and profiles of other batch
sizes are made from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.call_names import call_name
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import CodecOption, Profile, Value
from adacc_hf.artifacts.size_model import Shapes, profile_structure, size_dependent_numbers
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.cost_model import Prices, operator_workspaces
from adacc_hf.price.measurement import PRICED_HEADS, Measurement
from adacc_hf.run.blocks import Installation, PlainStrategy
from adacc_hf.run.call import Recording
from adacc_hf.tape.call_key import KnownShapes
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    TensorShape,
    batch_shapes,
    num_elements,
    resize_batch,
    to_profile_shapes,
)
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.memory import forward_loss

log = logging.getLogger(__name__)

LEAST_TOKENS = 8
"""Texts of fewer tokens are not cut."""
FEW_TOKENS = 16
"""Tokens of the smaller one of two parts."""
ALIGNED = 16
"""On a GPU, lengths that are multiples of this number and other lengths have separate tapes (see
`symbolic_tape.CallSizes`)."""

MEDIA = ("image", "video", "audio", "speech")
"""Words in the names of config settings that hold the number of a token which stands for an image or a sound."""

UNSUPPORTED_BATCH_ERRORS = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError)
"""Errors that models raise on a part of a batch whose tensors do not fit together."""


class TapeRecordingStrategy:
    """The strategy that records every call of a block into a tape cache. No backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, tape_cache: TapeCache) -> None:
        self.name = name
        self.tape_cache = tape_cache
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        key = KnownShapes(self.tape_cache.untraceable).key(block, fn, args, kwargs)
        recording = Recording(call_name(self.name, self.num_calls), block, args, kwargs)
        result = recording.run(fn)
        self.tape_cache.remember(self.tape_cache.verified_tape(recording.recorder), key, recording.name)
        recording.discard()
        return result


def move_media_first(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return `batch` with the positions that stand for images or sounds moved first in all texts, and the number of
    these positions.

    A model with images rejects a text from which some of these positions were cut. The operators and the memory do not
    depend on the order of the positions.
    """
    ids, media_tokens = batch.get("input_ids"), _media_tokens(model)
    if not media_tokens or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return dict(batch), 0
    is_media = torch.isin(ids, torch.tensor(media_tokens, device=ids.device)).any(0)
    order, length = torch.argsort((~is_media).int(), stable=True), ids.shape[1]
    reordered = {
        name: value[:, order] if isinstance(value, torch.Tensor) and value.shape[1:] == (length,) else value
        for name, value in batch.items()
    }
    return reordered, int(is_media.sum())


def _media_tokens(model: nn.Module) -> list[int]:
    """Return the token numbers that stand for images and sounds, read from the model's config."""
    config = getattr(getattr(model, "config", None), "__dict__", {})
    return sorted(
        value
        for name, value in config.items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and any(m in name for m in MEDIA)
    )


def small_parts(batch: Mapping[str, Any], uncut_tokens: int = 0, has_pairs: bool = False) -> list[list[dict[str, Any]]]:
    """Return lists of small parts of a batch. The profile of the whole batch can be extrapolated from each list alone.

    No part is larger than half of the batch, and a list's smallest part comes first. Without texts, a batch of fewer
    than four samples has no parts. With texts, the parts vary in samples (a quarter of the batch, and one more) and
    length. With `has_pairs`, or if labels are longer or shorter than their text, the second text's length varies
    independently. The first `uncut_tokens` tokens of each text are never cut, and do not count in "half".

    Later lists are alternatives if the first list's parts take too much memory, or if the model runs different
    operators on one sample. For texts these are parts of 2/8, 3/8 and 4/8 of the tokens. They predict a peak that is
    the larger of two sums less accurately.
    """
    shapes = batch_shapes(batch)
    num_samples = batch["input_ids"].shape[0] if uncut_tokens else _samples_and_lengths(batch)[0]
    lengths = {shape.name: shape.size[1] for shape in shapes if len(shape.size) == 2}
    if uncut_tokens:  # tensors of images, patches and grids are not texts
        lengths = {name: length for name, length in lengths.items() if length == batch["input_ids"].shape[1]}
    is_text = bool(lengths) and all(n > 1 for n in lengths.values())
    has_features = uncut_tokens > 0 or any(len(shape.size) > 2 for shape in shapes)
    second_texts = {name for name in lengths if has_pairs and _is_of_decoder(name)}
    if len(set(lengths.values())) > 1 and "labels" in lengths:
        second_texts |= {name for name in lengths if lengths[name] == lengths["labels"]}
    if second_texts == lengths.keys():  # the model reads no text, but features of a sound or an image
        second_texts = set()
    # A batch of one sample often runs different operators, so that the smallest part has two samples.
    few_samples = max(2, num_samples // 4) if num_samples > 1 else 1
    more_samples = few_samples + 1 if num_samples > 1 else few_samples
    has_many = num_samples >= 3 * few_samples and num_samples > 1
    few_longest, more_longest = (min(8, 4 * num_samples // count) for count in (few_samples, more_samples))
    """Longest part of a text, in eighths, that keeps `few_samples` and `more_samples` within half of the batch."""
    if is_text and second_texts:
        # Five different (samples, length) pairs per text: the polynomial of a number that depends on one text has
        # three terms.
        half, three_quarters, more_half = few_longest // 2, 3 * few_longest // 4, more_longest // 2
        lists = [
            [
                (few_samples, half, three_quarters),
                (few_samples, three_quarters, few_longest),
                (few_samples, few_longest, half),
                (few_samples, few_longest, few_longest),
            ]
        ]
        lists[0] += [(more_samples, more_half, more_longest), (more_samples, more_longest, more_half)]
        smaller_parts = [
            (few_samples, 2, 3),
            (few_samples, 3, 4),
            (few_samples, 4, 2),
            (few_samples, 4, 4),
            (more_samples, 2, 3),
            (more_samples, 3, 2),
        ]
    elif is_text:
        parts = [(few_samples, few_longest // 2), (few_samples, few_longest), (more_samples, more_longest)]
        if not has_many or has_features:  # two lengths per number of samples distinguish a product from a sum
            if num_samples > 1:
                parts = [(few_samples, 3 * few_longest // 4), (more_samples, more_longest // 2), *parts]
            else:
                parts = [(1, n) for n in (1, 2, 3, 4)]
        if has_features and num_samples > 1:  # memory that grows with samples alone is one more term
            parts.append((few_samples, few_longest // 4))
        lists = [[(count, n, n) for count, n in parts]]
        smaller_parts = [(count, n, n) for count in dict.fromkeys((few_samples, more_samples)) for n in (2, 3, 4)]
    else:
        sample_counts = [(few_samples, more_samples)] if has_many else [(1, 2), (2, 3)] if num_samples > 3 else []
        lists, smaller_parts = [[(count, 8, 8) for count in pair] for pair in sample_counts], []

    def shortened(length: int, eighths: int) -> int:
        if 0 < uncut_tokens < length:
            return uncut_tokens + max(1, (length - uncut_tokens) * eighths // 8)
        return _shortened(length, eighths, has_many or length >= (3 if num_samples > 2 else 8) * ALIGNED)

    if (
        all(LEAST_TOKENS <= shortened(n, 2) < shortened(n, 3) < shortened(n, 4) for n in lengths.values())
        and smaller_parts
    ):
        lists.append(smaller_parts)

    def cut(shape: TensorShape, count: int, first: int, second: int) -> TensorShape:
        size = list(shape.size)
        if size[0] == num_samples or (uncut_tokens and size[0] % num_samples == 0):  # patches of all images together
            size[0] = size[0] // num_samples * count
        if shape.name in lengths:
            size[1] = shortened(size[1], second if shape.name in second_texts else first)
        return TensorShape(shape.name, tuple(size))

    cut_shapes = [dict.fromkeys(tuple(cut(shape, *part) for shape in shapes) for part in parts) for parts in lists]
    return [
        [_keep_padding(batch, resize_batch(batch, shapes, after), shapes) for after in sorted(parts, key=num_elements)]
        for parts in cut_shapes
    ]


def _shortened(length: int, eighths: int, is_aligned: bool) -> int:
    """Return about `eighths` / 8 of `length`.

    If `is_aligned`, an aligned length stays aligned, so that a GPU runs the same tape for both. The codecs that suit a
    value mostly stay the same too, because they depend on multiples of eight. Short texts are cut to distinct lengths
    of at least 3 tokens.
    """
    if eighths == 8:
        return length
    part = length * eighths // 8
    if length % ALIGNED == 0 and is_aligned:
        return max(ALIGNED, part // ALIGNED * ALIGNED)
    if length < 3 * LEAST_TOKENS:
        return max(part, 1 + eighths)
    return part if part % ALIGNED else part + ALIGNED // 2


def record_other_sizes(
    model: nn.Module, batch: Mapping[str, Any], installation: Installation, tape_cache: TapeCache
) -> None:
    """Record every block on parts of `batch`, until the model rejects a part."""
    if is_sharded(installation.model):  # a forward that fails midway would leave other ranks waiting
        return
    for part in _profiled_parts(batch, is_encoder_decoder(installation.model)):
        for name, function in installation.blocks.items():
            function.strategy = TapeRecordingStrategy(name, tape_cache)
        installation.begin_step()
        try:
            forward_loss(model, part)
        except UNSUPPORTED_BATCH_ERRORS as error:  # such as a text without the positions of its images
            log.info(
                "Adacc: the model does not accept a part of the batch (%s): new sizes are recorded as they occur",
                error,
            )
            return
        finally:
            for function in installation.blocks.values():
                function.strategy = PlainStrategy()


def with_other_sizes(
    profile: Profile,
    batch: Mapping[str, Any],
    installation: Installation,
    measure: Callable[[Mapping[str, Any]], Profile],
) -> Profile:
    """Return `profile` with the numbers that `measure` returns for parts of `batch`, until the model rejects a part."""
    measured = [(to_profile_shapes(batch_shapes(batch)), tuple(size_dependent_numbers(profile)))]
    if is_sharded(installation.model):  # see `record_other_sizes`
        return profile
    is_pair = is_encoder_decoder(installation.model)
    for part in (*_profiled_parts(batch, is_pair), *_extra_parts(batch, is_pair)):
        try:
            other = measure(part)
        except UNSUPPORTED_BATCH_ERRORS as error:
            log.info(
                "Adacc: the model does not accept a part of the batch (%s): new sizes are profiled as they occur",
                error,
            )
            break
        if profile_structure(other) == profile_structure(profile):
            measured.append((to_profile_shapes(batch_shapes(part)), tuple(size_dependent_numbers(other))))
    return replace(profile, measured=tuple(measured)) if len(measured) > 1 else profile


def resize_profile(profile: Profile, shapes: Shapes) -> Profile:
    """Return `profile` for batches of `shapes`, with the codecs that suit the resized values.

    `shapes` must have a size class (`profile.sizes.size_class`).
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
    """Yield the codec options of a value at its new size."""
    dtype = getattr(torch, after.dtype)
    ratio = after.nbytes / before.nbytes if before.nbytes else 1.0
    for option in after.codecs:
        codec = get_codec(option.codec, **dict(option.options))
        if codec.supports(after.encoded_shape, dtype):
            nbytes = codec.predicted_bytes(after.encoded_shape, dtype)
            encode_ms, decode_ms = option.encode_ms * ratio, option.decode_ms * ratio
            yield replace(option, nbytes=nbytes, encode_ms=encode_ms, decode_ms=decode_ms)


class MemoryOnlyMeasurement(Measurement):
    """The readings of another measurement, without prices. The whole batch supplies times and errors."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self.rng_use = measurement.rng_use
        for name in ("verify", "meter", "on_gradient", "backward", "seconds_at", "available_bytes", "random_states"):
            setattr(self, name, getattr(measurement, name))

    def outliers(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
        return {}

    def price(
        self,
        tape: Tape,
        bases: list[torch.Tensor],
        config: AdaccConfig,
        outliers: dict[int, int],
        run_block: Callable[[], object] | None = None,
    ) -> Prices:
        return Prices([0.0] * len(tape.operators), operator_workspaces(tape, bases))

    def gradient_errors(
        self, tape: Tape, bases: list[torch.Tensor], prices: Prices, config: AdaccConfig
    ) -> GradientErrors:
        return GradientErrors()

    def price_call(self, run: Callable[[], object], device: torch.device) -> Prices:
        return Prices([], [])

    def head_times(self, find_losses: Callable[[], list[LossCall]]) -> dict[str, float]:
        return dict.fromkeys(PRICED_HEADS, 0.0)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if the model reads one text and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _profiled_parts(batch: Mapping[str, Any], is_pair: bool) -> Iterator[dict[str, Any]]:
    """Yield smaller copies of `batch` to measure: half of each text, and a few tokens of at most two samples.

    If `is_pair`, the model is an encoder-decoder. Then also yield a copy with half of the encoder's text and only a few
    tokens of the decoder's. If the texts are too short to be cut, yield only a copy with fewer samples, or nothing.
    """
    num_samples, lengths = _samples_and_lengths(batch)
    few_samples = min(2, num_samples)
    parts: list[tuple[int, int | None, int | None]]
    if not _can_be_shorter(lengths, is_pair):
        parts = [(few_samples, None, None)] if few_samples < num_samples else []
    else:
        half, short = _shorter(lengths[0], lengths[0] // 2), _shorter(lengths[0], min(FEW_TOKENS, lengths[0] // 4))
        parts = [
            (num_samples, half, half),
            (few_samples, short, short),
            *([(num_samples, half, short)] if is_pair else []),
        ]
    yield from _cut_batch(batch, parts, is_pair)


def _extra_parts(batch: Mapping[str, Any], is_pair: bool) -> Iterator[dict[str, Any]]:
    """Yield one more cut of `batch`, with another number of samples and tokens than all `_profiled_parts`.

    Yield nothing if the texts are too short to be cut. A peak is a sum of three terms: for attention's scores, for
    other tensors of the batch, and for the weights. Three batch sizes determine the terms, and a fourth checks the fit.
    A batch of one or two samples is repeated, because all other parts have as many samples as the batch.
    """
    num_samples, lengths = _samples_and_lengths(batch)
    if _can_be_shorter(lengths, is_pair):
        part_samples, quarters = (2, 3) if num_samples > 2 else (2 * num_samples, 1)
        length = _shorter(lengths[0], quarters * lengths[0] // 4)
        yield from _cut_batch(batch, [(part_samples, length, length)], is_pair)


def _samples_and_lengths(batch: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the number of samples of `batch` and the distinct lengths of its texts, in order."""
    shapes = batch_shapes(batch)
    samples = next((shape.size[0] for shape in shapes if len(shape.size) > 1), 1)
    return samples, sorted({shape.size[1] for shape in shapes if len(shape.size) == 2})


def _is_of_decoder(name: str) -> bool:
    """Return True if the batch's tensor `name` is as long as the decoder's text in an encoder-decoder model."""
    return name == "labels" or name.startswith("decoder_")


def _can_be_shorter(lengths: list[int], is_pair: bool) -> bool:
    return bool(lengths) and lengths[0] >= LEAST_TOKENS * len(lengths) * (2 if is_pair else 1)


def _cut_batch(
    batch: Mapping[str, Any], parts: Sequence[tuple[int, int | None, int | None]], is_pair: bool
) -> Iterator[dict[str, Any]]:
    """Yield `batch` cut to each of `parts`: (samples, tokens of the first text, tokens of the second)."""
    shapes, (num_samples, lengths) = batch_shapes(batch), _samples_and_lengths(batch)
    for part_samples, first, second in parts:
        cut_shapes = tuple(
            _cut_shape(shape, num_samples, part_samples, lengths, first, second, is_pair) for shape in shapes
        )
        yield _keep_padding(batch, resize_batch(batch, shapes, cut_shapes), shapes)


def _shorter(length: int, target: int) -> int:
    """Return a text length of about `target` tokens, a multiple of ALIGNED only if `length` is one.

    Aligned and other lengths have separate tapes. If `length` is not aligned, or below 3 * ALIGNED, return an odd
    length.
    """
    return max(ALIGNED, target // ALIGNED * ALIGNED) if length % ALIGNED == 0 and length >= 3 * ALIGNED else target | 1


def _cut_shape(
    shape: TensorShape,
    num_samples: int,
    part_samples: int,
    lengths: list[int],
    first: int | None,
    second: int | None,
    is_pair: bool,
) -> TensorShape:
    """Return `shape` with fewer samples and tokens. Each length of the batch maps to a distinct length, and so do two
    texts of a pair that have equal lengths."""
    size = list(shape.size)
    if size[0] == num_samples:
        size[0] = part_samples
    if len(size) == 2 and first is not None and second is not None:
        shorter = second + len(lengths) if is_pair and _is_of_decoder(shape.name) else first
        size[1] = shorter + lengths.index(size[1])
    return TensorShape(shape.name, tuple(size))


def _keep_padding(batch: Mapping[str, Any], part: dict[str, Any], shapes: BatchShapes) -> dict[str, Any]:
    """Return `part` with masked positions wherever `batch` has some, and with several documents in a row if `batch` has
    rows of several documents. Models leave out a mask that masks nothing.

    An eighth of a text's positions are masked, because one position of a sound is shorter than one of its features.
    """
    for name in (shape.name for shape in shapes if shape.name.endswith("position_ids") and len(shape.size) == 2):
        part[name] = _keep_documents(batch[name], part[name])
    for shape in shapes:
        mask = part[shape.name]
        if (
            shape.name.endswith("attention_mask")
            and mask.dim() == 2
            and bool(mask.all())
            and not batch[shape.name].all()
        ):
            num_masked = max(1, mask.shape[1] // 8)
            part[shape.name] = mask = mask.clone()
            mask[0, slice(num_masked) if not bool(batch[shape.name][:, 0].all()) else slice(-num_masked, None)] = 0
    return part


def _keep_documents(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the positions `part`, cut from the positions `whole`, with a second document in each row if `whole` has
    rows of several documents.

    A document begins where positions do not increase. A model masks other documents only if a row has several.
    """

    def has_documents(positions: torch.Tensor) -> bool:
        return bool((positions.diff(dim=1) <= 0).any())

    middle = part.shape[1] // 2
    if not has_documents(whole) or has_documents(part) or middle == 0:
        return part
    return torch.cat([part[:, :middle], part[:, middle:] - part[:, middle : middle + 1]], dim=1)
