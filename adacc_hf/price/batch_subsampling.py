"""Parts of the profiled batch: the model's blocks are recorded on them, and its memory measured, from which tapes and
profiles of all sizes are made."""

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
from adacc_hf.artifacts.size_model import Shapes, numbers_of, profile_outline
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.cost_model import Prices, operator_workspaces
from adacc_hf.price.measurement import PRICED_HEADS, Measurement
from adacc_hf.run.blocks import Installation, Plainly
from adacc_hf.run.call import Recording
from adacc_hf.tape.call_key import KnownShapes
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.batch_shapes import BatchShapes, TensorShape, batch_shapes, num_elements, resized, to_plain
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.memory import forward_loss

log = logging.getLogger(__name__)

LEAST_TOKENS = 8
"""Texts that are shorter are not cut."""
FEW_TOKENS = 16
"""Tokens of the smaller one of two parts."""
ALIGNED = 16
"""What lengths are told apart by on a GPU: see `family.CallSizes`."""

MEDIA = ("image", "video", "audio", "speech")
"""Words in the names of settings that hold a token's number which stands for something else than text."""

NOT_TAKEN = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError)
"""What models raise at a batch whose parts do not fit together."""


class RecordSize:
    """The strategy that records every call of a block for a library; no backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, library: TapeCache) -> None:
        self.name = name
        self.library = library
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        key = KnownShapes(self.library.untraceable).key(block, fn, args, kwargs)
        recording = Recording(call_name(self.name, self.num_calls), block, args, kwargs)
        result = recording.run(fn)
        self.library.remember(self.library.verified(recording.recorder), key, recording.name)
        recording.discard()
        return result


def media_first(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return `batch` with the positions first that stand for images or sounds in any of its texts, and their number.

    A model that sees takes no text from which some of these positions were cut. Which operators run, and in how much
    memory, does not depend on where they are.
    """
    ids, tokens = batch.get("input_ids"), _media_tokens(model)
    if not tokens or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return dict(batch), 0
    stands = torch.isin(ids, torch.tensor(tokens, device=ids.device)).any(0)
    order, length = torch.argsort((~stands).int(), stable=True), ids.shape[1]
    moved = {
        name: value[:, order] if isinstance(value, torch.Tensor) and value.shape[1:] == (length,) else value
        for name, value in batch.items()
    }
    return moved, int(stands.sum())


def _media_tokens(model: nn.Module) -> list[int]:
    """Return the token numbers that stand for images and sounds in a text, as the model's config names them."""
    config = getattr(getattr(model, "config", None), "__dict__", {})
    return sorted(
        value
        for name, value in config.items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and any(m in name for m in MEDIA)
    )


def small_parts(batch: Mapping[str, Any], least_tokens: int = 0, has_pairs: bool = False) -> list[list[dict[str, Any]]]:
    """Return lists of small parts of a batch. The profile of the whole batch can be extrapolated from each list alone.

    No part is larger than half of the batch, and a list's smallest part comes first. Empty for a batch of fewer than
    four samples without texts. With texts, the parts vary in samples (a quarter of the batch, and one more) and length.
    With `has_pairs`, or labels longer or shorter than their text, the second text's length varies independently. The
    first `least_tokens` tokens of each text are never cut, and are not counted in "half".

    Later lists are alternatives if the first list's parts take too much memory, or if the model runs other operators on
    one sample. For texts these are parts of 2/8, 3/8 and 4/8 of the tokens. They predict less well a peak that is the
    larger of two sums.
    """
    shapes = batch_shapes(batch)
    samples = batch["input_ids"].shape[0] if least_tokens else _extent(batch)[0]
    lengths = {shape.name: shape.size[1] for shape in shapes if len(shape.size) == 2}
    if least_tokens:  # sizes of images, patches and grids are no texts
        lengths = {name: length for name, length in lengths.items() if length == batch["input_ids"].shape[1]}
    is_text = bool(lengths) and all(n > 1 for n in lengths.values())
    has_features = least_tokens > 0 or any(len(shape.size) > 2 for shape in shapes)
    second = {name for name in lengths if has_pairs and _is_written(name)}
    if len(set(lengths.values())) > 1 and "labels" in lengths:
        second |= {name for name in lengths if lengths[name] == lengths["labels"]}
    if second == lengths.keys():  # what is read is no text: features of a sound, an image
        second = set()
    few = max(2, samples // 4) if samples > 1 else 1  # a single sample often runs other operators
    more = few + 1 if samples > 1 else few
    has_many = samples >= 3 * few and samples > 1
    most, less = (min(8, 4 * samples // number) for number in (few, more))
    """Longest part of each text, in eighths, that keeps `few` and `more` samples within half of the batch."""
    if is_text and second:
        # Five different (samples, length) pairs for each text: a number that depends on one text alone has three terms.
        low, middle, rest = most // 2, 3 * most // 4, less // 2
        lists = [[(few, low, middle), (few, middle, most), (few, most, low), (few, most, most)]]
        lists[0] += [(more, rest, less), (more, less, rest)]
        further = [(few, 2, 3), (few, 3, 4), (few, 4, 2), (few, 4, 4), (more, 2, 3), (more, 3, 2)]
    elif is_text:
        parts = [(few, most // 2), (few, most), (more, less)]
        if not has_many or has_features:  # two lengths for each number of samples tell a product of both from a sum
            parts = [(few, 3 * most // 4), (more, less // 2), *parts] if samples > 1 else [(1, n) for n in (1, 2, 3, 4)]
        if has_features and samples > 1:  # memory that grows with samples alone is a term more
            parts.append((few, most // 4))
        lists = [[(number, n, n) for number, n in parts]]
        further = [(number, n, n) for number in dict.fromkeys((few, more)) for n in (2, 3, 4)]
    else:
        numbers = [(few, more)] if has_many else [(1, 2), (2, 3)] if samples > 3 else []
        lists, further = [[(number, 8, 8) for number in two] for two in numbers], []

    def shortened(length: int, eighths: int) -> int:
        if 0 < least_tokens < length:
            return least_tokens + max(1, (length - least_tokens) * eighths // 8)
        return _shortened(length, eighths, has_many or length >= (3 if samples > 2 else 8) * ALIGNED)

    if all(LEAST_TOKENS <= shortened(n, 2) < shortened(n, 3) < shortened(n, 4) for n in lengths.values()) and further:
        lists.append(further)

    def cut(shape: TensorShape, number: int, first: int, other: int) -> TensorShape:
        size = list(shape.size)
        if size[0] == samples or (least_tokens and size[0] % samples == 0):  # patches of all images, in one row
            size[0] = size[0] // samples * number
        if shape.name in lengths:
            size[1] = shortened(size[1], other if shape.name in second else first)
        return TensorShape(shape.name, tuple(size))

    found = [dict.fromkeys(tuple(cut(shape, *part) for shape in shapes) for part in parts) for parts in lists]
    return [
        [_still_padded(batch, resized(batch, shapes, after), shapes) for after in sorted(parts, key=num_elements)]
        for parts in found
    ]


def _shortened(length: int, eighths: int, is_aligned: bool) -> int:
    """That part of `length`, about; if `is_aligned`, aligned where that is: then tapes of both are of one family on a
    GPU. Which codecs suit, as for multiples of eight, so stays as it is most often. Short texts are cut to lengths that
    differ, of 3 tokens or more."""
    if eighths == 8:
        return length
    part = length * eighths // 8
    if length % ALIGNED == 0 and is_aligned:
        return max(ALIGNED, part // ALIGNED * ALIGNED)
    if length < 3 * LEAST_TOKENS:
        return max(part, 1 + eighths)
    return part if part % ALIGNED else part + ALIGNED // 2


def record_other_sizes(
    model: nn.Module, batch: Mapping[str, Any], installation: Installation, library: TapeCache
) -> None:
    """Record every block on parts of `batch`, as far as the model takes such."""
    if is_sharded(installation.model):  # a forward that ends in its midst would leave other ranks waiting
        return
    for part in _parts(batch, has_pairs(installation.model)):
        for name, function in installation.blocks.items():
            function.strategy = RecordSize(name, library)
        installation.begin_step()
        try:
            forward_loss(model, part)
        except NOT_TAKEN as error:  # of images, say, as many as the text has places for
            log.info("Adacc: the model takes no part of a batch (%s): sizes are recorded as they come", error)
            return
        finally:
            for function in installation.blocks.values():
                function.strategy = Plainly()


def with_other_sizes(
    profile: Profile,
    batch: Mapping[str, Any],
    installation: Installation,
    measure: Callable[[Mapping[str, Any]], Profile],
) -> Profile:
    """`profile` of `batch` with what `measure` says of parts of it, as far as the model takes such."""
    measured = [(to_plain(batch_shapes(batch)), tuple(numbers_of(profile)))]
    if is_sharded(installation.model):  # as above
        return profile
    for part in (*_parts(batch, has_pairs(installation.model)), *_further_parts(batch, has_pairs(installation.model))):
        try:
            other = measure(part)
        except NOT_TAKEN as error:
            log.info("Adacc: the model takes no part of a batch (%s): sizes are profiled as they come", error)
            break
        if profile_outline(other) == profile_outline(profile):
            measured.append((to_plain(batch_shapes(part)), tuple(numbers_of(other))))
    return replace(profile, measured=tuple(measured)) if len(measured) > 1 else profile


def at_size(profile: Profile, shapes: Shapes) -> Profile:
    """`profile` for batches of `shapes`, which its `sizes.class_of` gave, with the codecs that suit values there."""
    assert profile.sizes is not None
    told = profile.sizes.at(profile, shapes)
    if told is profile:
        return profile
    kinds = []
    for before, after in zip(profile.kinds, told.kinds, strict=True):
        pairs = zip(before.values, after.values, strict=True)
        values = (replace(v, codecs=tuple(_resized(old, v))) if v.codecs else v for old, v in pairs)
        kinds.append(replace(after, values=tuple(values)))
    return replace(told, kinds=tuple(kinds))


def _resized(before: Value, after: Value) -> Iterator[CodecOption]:
    """The codecs of a value at its new size."""
    dtype = getattr(torch, after.dtype)
    ratio = after.nbytes / before.nbytes if before.nbytes else 1.0
    for option in after.codecs:
        codec = get_codec(option.codec, **dict(option.options))
        if codec.supports(after.encoded_shape, dtype):
            nbytes = codec.predicted_bytes(after.encoded_shape, dtype)
            encode_ms, decode_ms = option.encode_ms * ratio, option.decode_ms * ratio
            yield replace(option, nbytes=nbytes, encode_ms=encode_ms, decode_ms=decode_ms)


class MemoryAlone(Measurement):
    """The readings of another measurement, but for prices: times and accuracies are those of the whole batch."""

    def __init__(self, others: Measurement) -> None:
        self._others = others
        self.rng_use = others.rng_use
        for name in ("verify", "meter", "on_gradient", "backward", "seconds_at", "available_bytes", "random_states"):
            setattr(self, name, getattr(others, name))

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


def has_pairs(model: nn.Module) -> bool:
    """Whether the model reads one text and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _parts(batch: Mapping[str, Any], is_pair: bool) -> Iterator[dict[str, Any]]:
    """Parts of `batch`: one of half as many tokens, one of few samples and tokens, and of a pair of texts one in which
    only the second one is short."""
    samples, lengths = _extent(batch)
    few = min(2, samples)
    parts: list[tuple[int, int | None, int | None]]
    if not _can_be_shorter(lengths, is_pair):
        parts = [(few, None, None)] if few < samples else []
    else:
        half, short = _shorter(lengths[0], lengths[0] // 2), _shorter(lengths[0], min(FEW_TOKENS, lengths[0] // 4))
        parts = [(samples, half, half), (few, short, short), *([(samples, half, short)] if is_pair else [])]
    yield from _cut_to(batch, parts, is_pair)


def _further_parts(batch: Mapping[str, Any], is_pair: bool) -> Iterator[dict[str, Any]]:
    """One more part, of other numbers of samples and tokens than those of `_parts`.

    Attention's scores, all else of the batch and the weights make three terms of a peak: to find them takes three
    sizes, and a fourth one to check them. A batch of few samples is repeated: else nothing would tell of more.
    """
    samples, lengths = _extent(batch)
    if _can_be_shorter(lengths, is_pair):
        others, quarters = (2, 3) if samples > 2 else (2 * samples, 1)
        length = _shorter(lengths[0], quarters * lengths[0] // 4)
        yield from _cut_to(batch, [(others, length, length)], is_pair)


def _extent(batch: Mapping[str, Any]) -> tuple[int, list[int]]:
    """The number of samples of `batch`, and the lengths of its texts."""
    shapes = batch_shapes(batch)
    samples = next((shape.size[0] for shape in shapes if len(shape.size) > 1), 1)
    return samples, sorted({shape.size[1] for shape in shapes if len(shape.size) == 2})


def _is_written(name: str) -> bool:
    """Return True for a tensor of the text that a model of pairs writes, by its name in the batch."""
    return name == "labels" or name.startswith("decoder_")


def _can_be_shorter(lengths: list[int], is_pair: bool) -> bool:
    return bool(lengths) and lengths[0] >= LEAST_TOKENS * len(lengths) * (2 if is_pair else 1)


def _cut_to(
    batch: Mapping[str, Any], parts: Sequence[tuple[int, int | None, int | None]], is_pair: bool
) -> Iterator[dict[str, Any]]:
    """`batch` with as many samples, tokens, and tokens of the second text, for each of `parts`."""
    shapes, (samples, lengths) = batch_shapes(batch), _extent(batch)
    for others, first, second in parts:
        after = tuple(_cut(shape, samples, others, lengths, first, second, is_pair) for shape in shapes)
        yield _still_padded(batch, resized(batch, shapes, after), shapes)


def _shorter(length: int, about: int) -> int:
    """A length of `about` as many tokens that is aligned where `length` is, and odd where it is not."""
    return max(ALIGNED, about // ALIGNED * ALIGNED) if length % ALIGNED == 0 and length >= 3 * ALIGNED else about | 1


def _cut(
    shape: TensorShape,
    samples: int,
    others: int,
    lengths: list[int],
    first: int | None,
    second: int | None,
    is_pair: bool,
) -> TensorShape:
    """`shape` with other samples and fewer tokens. Each length of the batch gets one of its own, and so do the two of a
    pair of texts that happen to be of one length."""
    size = list(shape.size)
    if size[0] == samples:
        size[0] = others
    if len(size) == 2 and first is not None and second is not None:
        shorter = second + len(lengths) if is_pair and _is_written(shape.name) else first
        size[1] = shorter + lengths.index(size[1])
    return TensorShape(shape.name, tuple(size))


def _still_padded(batch: Mapping[str, Any], smaller: dict[str, Any], shapes: BatchShapes) -> dict[str, Any]:
    """Return `smaller` with masked positions where `batch` has some: models leave out a mask that masks nothing.

    An eighth of a text's positions are masked, since one of a sound's is less than one of its features.
    """
    for shape in shapes:
        mask = smaller[shape.name]
        if (
            shape.name.endswith("attention_mask")
            and mask.dim() == 2
            and bool(mask.all())
            and not batch[shape.name].all()
        ):
            some = max(1, mask.shape[1] // 8)
            smaller[shape.name] = mask = mask.clone()
            mask[0, slice(some) if not bool(batch[shape.name][:, 0].all()) else slice(-some, None)] = 0
    return smaller
