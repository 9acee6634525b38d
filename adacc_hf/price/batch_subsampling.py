"""The profiled batch, and smaller parts of this batch. Blocks are recorded, and memory is measured, on the parts
too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    TensorShape,
    batch_shapes,
    num_elements,
    resize_batch,
    to_profile_shapes,
)
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.private import tree_leaves, tree_map_only

LEAST_TOKENS = 8
"""Minimum length, in tokens, that a sequence must have to be cut."""
FEW_TOKENS = 16
"""Maximum length, in tokens, of the sequences in the smallest part. If a quarter of the batch's length is less than
this number, the sequences are cut to the quarter."""
ALIGNED = 16
"""Alignment of sequence lengths on a GPU. A block may run different operators on multiples of this number than on other
lengths, so aligned and other lengths have separate tapes, the records of a block's operators."""

MEDIA = ("image", "video", "audio", "speech")
"""Words in the names of those config settings that are the id of an image or audio token."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The keyword arguments of a model's forward, labels included, and the sizes of the tensors among the arguments.

    Tensors that the training loop has computed with gradients, such as `inputs_embeds`, are detached: a backward of the
    profile must not free the loop's graph.
    """

    tensors: Mapping[str, Any]

    def __post_init__(self) -> None:
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(self.tensors)):
            object.__setattr__(self, "tensors", tree_map_only(torch.Tensor, _without_graph, self.tensors))

    @cached_property
    def shapes(self) -> BatchShapes:
        """Names and shapes of the batch's tensors."""
        return batch_shapes(self.tensors)

    @property
    def sizes(self) -> Shapes:
        """Names and shapes of the batch's tensors, in the format of `Profile.measured`."""
        return to_profile_shapes(self.shapes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storages of all tensors of the batch, each storage counted once."""
        return batch_bytes(self.tensors)

    @property
    def is_on_cpu(self) -> bool:
        """True if all tensors are on the CPU."""
        return all(value.device.type == "cpu" for value in self.tensors.values() if isinstance(value, torch.Tensor))

    @property
    def num_samples(self) -> int:
        """Number of samples in the profiled batch."""
        return next((shape.size[0] for shape in self.shapes if len(shape.size) > 1), 1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch: elements of the largest tensor of shape (samples, length), or 0 without such a
        tensor."""
        if not isinstance(self.tensors, Mapping):  # the entry of the profiler refuses such a batch in words
            return 0
        return max((prod(shape.size) for shape in self.shapes if len(shape.size) == 2), default=0)

    @property
    def lengths(self) -> list[int]:
        """Distinct lengths of the batch's sequences, in order."""
        return sorted({shape.size[1] for shape in self.shapes if len(shape.size) == 2})

    @cached_property
    def dimensions(self) -> set[int]:
        """Sizes by which a tensor of the model is recognized as one that grows with the batch: numbers of samples,
        lengths of sequences, and products of the two."""
        pairs = [shape.size[:2] if len(shape.size) == 2 else shape.size[:1] for shape in self.shapes]
        return {size for pair in pairs for size in (*pair, prod(pair))} - {1}

    @cached_property
    def vector_sequences(self) -> set[str]:
        """Names of the tensors with one vector for each position of a sequence: embeddings that the training loop has
        computed, and audio features that are as long as their mask. They are cut together with their sequence."""
        lengths = {shape.name: shape.size[1] for shape in self.shapes if len(shape.size) == 2}
        return {
            shape.name
            for shape in self.shapes
            if len(shape.size) == 3
            and (
                (shape.name.endswith("inputs_embeds") and shape.size[1] in lengths.values())
                or (shape.name == "input_features" and shape.size[1] == lengths.get("attention_mask"))
            )
        }

    @cached_property
    def audio_lengths(self) -> set[int]:
        """Lengths of the audio inputs, which are waveforms (2-D) or sequences of feature vectors (3-D)."""
        features = {name for name in self.vector_sequences if not name.endswith("embeds")}
        return {
            shape.size[1]
            for shape in self.shapes
            if shape.name in features or (len(shape.size) == 2 and self.tensors[shape.name].is_floating_point())
        }

    @property
    def has_features(self) -> bool:
        """True if the batch has images or other features that are never shortened: all parts have them whole."""
        return any(len(shape.size) > 2 and shape.name not in self.vector_sequences for shape in self.shapes)

    def share_of(self, whole: Batch) -> float:
        """Return the number of elements of this part, divided by that of the batch `whole`."""
        return num_elements(self.shapes) / num_elements(whole.shapes)

    def resized(self, shapes: Sequence[TensorShape]) -> Batch:
        """Return a copy of the batch in which each tensor is cut or repeated to its shape in `shapes`.

        Models drop a mask in which no position is masked. Therefore, if cutting removes all masked positions of a mask,
        an eighth of the positions of one sample are masked again. A single position may not be enough, because one
        position of audio input is shorter than an audio feature. If rows hold several documents each, the cut rows hold
        several documents too.
        """
        tensors = resize_batch(self.tensors, self.shapes, tuple(shapes))
        for shape in self.shapes:
            if shape.name.endswith("position_ids") and len(shape.size) == 2:
                tensors[shape.name] = _keep_documents(self.tensors[shape.name], tensors[shape.name])
        for name in (shape.name for shape in self.shapes if shape.name.endswith("mask")):  # GRPO has a "prompt_mask"
            whole_mask, mask = self.tensors[name], tensors[name]
            if mask.dim() == 2 and bool(mask.all()) and not whole_mask.all():
                num_masked = max(1, mask.shape[1] // 8)
                tensors[name] = mask = mask.clone()
                mask[0, slice(num_masked) if not bool(whole_mask[:, 0].all()) else slice(-num_masked, None)] = 0
        return Batch(tensors)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf tensor with the same memory that requires a gradient if `tensor` does."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def move_media_first(model: nn.Module, batch: Batch) -> tuple[Batch, int]:
    """Return a copy of `batch` with image and audio positions moved to the start of each sequence, and the number of
    these positions.

    A model that reads images rejects a sequence from which some image positions were cut, so only the text after these
    positions can be cut. The operators and the memory do not depend on the order of the positions.
    """
    ids, media_tokens = batch.tensors.get("input_ids"), _media_tokens(model)
    if not media_tokens or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return batch, 0
    is_media = torch.isin(ids, torch.tensor(media_tokens, device=ids.device)).any(0)
    order, length = torch.argsort((~is_media).int(), stable=True), ids.shape[1]
    reordered = {
        name: value[:, order] if isinstance(value, torch.Tensor) and value.shape[1:] == (length,) else value
        for name, value in batch.tensors.items()
    }
    return Batch(reordered), int(is_media.sum())


def _media_tokens(model: nn.Module) -> list[int]:
    """Return the token ids that stand for images and audio, read from the model's config."""
    config = getattr(getattr(model, "config", None), "__dict__", {})
    return sorted(
        value
        for name, value in config.items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and any(m in name for m in MEDIA)
    )


def small_parts(batch: Batch, uncut_tokens: int = 0, has_pairs: bool = False) -> list[list[Batch]]:
    """Return alternative lists of small parts of a batch. From each list alone, the profile of the whole batch can be
    extrapolated.

    A part contains some of the samples, and some of the tokens of each sample. For example, the first list for 8
    samples of 128 tokens is 2 x 64, 2 x 128 and 3 x 128 tokens. A list's smallest part comes first. No part is larger
    than half of the batch. If the batch has no sequences of tokens and fewer than four samples, there are no parts.

    If `has_pairs` is True, the model is an encoder-decoder, and the two sequences of a sample are cut to different
    lengths. The same holds if the labels' length differs from the inputs' length. The first `uncut_tokens` tokens of
    each sequence are never cut. They are left out when a part is compared with half of the batch.

    Later lists are for batches whose first list takes too much memory, and for models that run different operators on
    one sample than on several. For sequences, the last list contains parts of 2/8, 3/8 and 4/8 of the tokens. If these
    lengths are distinct, this list is the only one for two to five samples of one text. From these parts, the peak of a
    model with two texts is predicted less accurately, because it is the larger of two sums.
    """
    shapes, num_samples = batch.shapes, batch.num_samples
    lengths = {shape.name: shape.size[1] for shape in shapes if len(shape.size) == 2}
    if uncut_tokens:  # tensors of images, patches and grids are not texts
        num_samples, text_length = batch.tensors["input_ids"].shape
        lengths = {name: length for name, length in lengths.items() if length == text_length}
    is_text = bool(lengths) and all(n > 1 for n in lengths.values())
    has_features = uncut_tokens > 0 or batch.has_features
    texts = _texts_of(lengths, has_pairs)
    # A batch of one sample often runs different operators, so the smallest part has two samples.
    few_samples = max(2, num_samples // 4) if num_samples > 1 else 1
    more_samples = few_samples + 1 if num_samples > 1 else few_samples
    has_many = num_samples >= 3 * few_samples and num_samples > 1
    few_longest, more_longest = (min(8, 4 * num_samples // count) for count in (few_samples, more_samples))
    """Longest length of a part with `few_samples` or `more_samples` samples, in eighths of the sequence. Longer parts
    would be larger than half of the batch."""
    few_lengths = (few_longest // 2, 3 * few_longest // 4, few_longest)
    if is_text and len(texts) > 1:
        lists = [_parts_of_texts(len(texts), few_samples, few_lengths, more_samples, (more_longest // 2, more_longest))]
        smaller_parts = _parts_of_texts(len(texts), few_samples, (2, 3, 4), more_samples, (2, 3))
    elif is_text:
        parts = [(few_samples, few_longest // 2), (few_samples, few_longest), (more_samples, more_longest)]
        if not has_many or has_features:  # two lengths per number of samples distinguish a product from a sum
            if num_samples > 1:
                parts = [(few_samples, 3 * few_longest // 4), (more_samples, more_longest // 2), *parts]
            else:
                parts = [(1, n) for n in (1, 2, 3, 4)]
        if has_features and num_samples > 1:  # memory that grows with samples alone is one more term
            parts.append((few_samples, few_longest // 4))
        lists = [[(count, (n,)) for count, n in parts]]
        pairs = [(few_samples, 2), (few_samples, 3), (few_samples, 4), (more_samples, 2), (more_samples, 3)]
        smaller_parts = [(count, (n,)) for count, n in dict.fromkeys(pairs)]
    else:
        sample_counts = [(few_samples, more_samples)] if has_many else [(1, 2), (2, 3)] if num_samples > 3 else []
        lists, smaller_parts = [[(count, (8,)) for count in pair] for pair in sample_counts], []

    def shortened(length: int, eighths: int, with_alignment: bool = True) -> int:
        if 0 < uncut_tokens < length:
            return uncut_tokens + max(1, (length - uncut_tokens) * eighths // 8)
        if length in batch.audio_lengths:
            return _cut_audio_length(length, length * eighths // 8)
        if not with_alignment:
            return max(1 + eighths, length * eighths // 8)
        return _shortened_length(length, eighths, has_many or length >= (3 if num_samples > 2 else 8) * ALIGNED)

    alignments = [True] * len(lists)
    # Only tapes of a GPU depend on the alignment. The aligned lengths of a text of up to 80 tokens are not distinct.
    for with_alignment in (True, False) if batch.is_on_cpu else (True,):
        shorter = [[shortened(length, eighths, with_alignment) for eighths in (2, 3, 4)] for length in lengths.values()]
        if smaller_parts and all(a < b < c for a, b, c in shorter) and min(lengths.values()) >= LEAST_TOKENS:
            if num_samples > 1 and not (has_features or len(texts) > 1 or has_many):
                lists, alignments = [], []  # the larger parts would take nearly twice as long
            lists.append(smaller_parts)
            alignments.append(with_alignment)
            break

    def cut(shape: TensorShape, count: int, eighths: Sequence[int], with_alignment: bool) -> TensorShape:
        size = list(shape.size)
        if size[0] == num_samples or (uncut_tokens and size[0] % num_samples == 0):  # patches of all images together
            size[0] = size[0] // num_samples * count
        if shape.name in lengths or shape.name in batch.vector_sequences:
            size[1] = shortened(size[1], eighths[_text_index(texts, shape.name)], with_alignment)
        return TensorShape(shape.name, tuple(size))

    cut_shapes = [
        dict.fromkeys(tuple(cut(shape, *part, with_alignment) for shape in shapes) for part in parts)
        for parts, with_alignment in zip(lists, alignments, strict=True)
    ]
    return [[batch.resized(after) for after in sorted(parts, key=num_elements)] for parts in cut_shapes]


def _texts_of(lengths: Mapping[str, int], has_pairs: bool) -> list[set[str]]:
    """Group the names of 2-D tensors into texts. The tensors of one text, such as ids and their mask, are cut together.

    `lengths` has the length of each tensor. There are several texts in three cases:
    - `has_pairs`: the model is an encoder-decoder, and the decoder's tensors are the second text;
    - the labels are shorter or longer than the inputs: they are the second text, with all tensors of their length;
    - several tensors have token ids, under names such as "anchor_input_ids" or "completion_ids", and differ in length:
      each length is one text.
    """
    second = {name for name in lengths if has_pairs and _is_decoder_tensor(name)}
    if len(set(lengths.values())) > 1 and "labels" in lengths:
        second |= {name for name in lengths if lengths[name] == lengths["labels"]}
    if second:  # if all tensors are the decoder's, the model reads no text, but features of audio or an image
        return [text for text in (lengths.keys() - second, second) if text]
    if "input_ids" not in lengths and len({length for name, length in lengths.items() if "ids" in name}) > 1:
        return [{name for name in lengths if lengths[name] == length} for length in dict.fromkeys(lengths.values())]
    return [set(lengths)]


def _text_index(texts: Sequence[set[str]], name: str) -> int:
    """Return the index of the text that the tensor `name` belongs to. The decoder's embeddings belong to the second."""
    by_name = next((index for index, text in enumerate(texts) if name in text), None)
    return by_name if by_name is not None else int(len(texts) > 1 and name.startswith("decoder_"))


def _parts_of_texts(
    num_texts: int, few_samples: int, few: tuple[int, int, int], more_samples: int, more: tuple[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return parts of a batch with several texts: the number of samples, and the length of each text in eighths.

    Parts with `few_samples` samples have texts of the three lengths `few`, and parts with `more_samples` samples have
    texts of the two lengths `more`. So each text occurs in five sizes (samples, length): most bytes depend on the size
    of one text by a polynomial with three terms, which three sizes determine and the others check. The lengths of two
    texts must not be proportional in all parts, or their effects could not be separated. Up to six texts fulfil this.
    """
    rotated = [tuple(few[(part + text) % 3] for text in range(num_texts)) for part in range(3)]
    swapped = [tuple(more[(part + text) % 2] for text in range(num_texts)) for part in range(2)]
    return [
        *((few_samples, lengths) for lengths in (*rotated, (few[2],) * num_texts)),
        *((more_samples, lengths) for lengths in swapped),
    ]


def _shortened_length(length: int, eighths: int, is_aligned: bool) -> int:
    """Return about `eighths` / 8 of the sequence length `length`.

    If `is_aligned` and `length` is a multiple of ALIGNED, the result is a multiple of ALIGNED too. A block on a GPU
    then runs the same operators at both lengths, and mostly the same codecs can encode its tensors, because many codecs
    need dimensions that are multiples of eight. Short sequences are cut to distinct lengths of at least 3 tokens.
    """
    if eighths == 8:
        return length
    part = length * eighths // 8
    if length % ALIGNED == 0 and is_aligned:
        return max(ALIGNED, part // ALIGNED * ALIGNED)
    if length < 3 * LEAST_TOKENS:
        return max(part, 1 + eighths)
    return part if part % ALIGNED else part + ALIGNED // 2


def _cut_audio_length(length: int, target: int) -> int:
    """Return the length, at least `target`, to which an audio input of this `length` is cut.

    Audio models compute one feature from several samples of the waveform, by convolutions that round lengths down. Two
    lengths that differ by a multiple of the convolutions' total stride are rounded by the same amount, so that the
    number of features is linear in the lengths returned. 3840 is a multiple of most models' strides, such as 320
    (Wav2Vec2) and 1920 (Mimi).
    """
    step = next((step for step in (3840, 1280, 320, 64, 16) if 8 * step <= length), 1)
    return length - (length - target) // step * step


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True if the model is an encoder-decoder: it reads one sequence and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def profiled_parts(batch: Batch, is_pair: bool) -> Iterator[Batch]:
    """Yield smaller copies of `batch` for profiling: one with half of each sequence, and one with two samples of few
    tokens each.

    If `is_pair`, the model is an encoder-decoder, and a third copy contains half of the encoder's sequence and few
    tokens of the decoder's sequence. If the sequences are too short to be cut, yield one copy with two samples. If the
    sequences are too short and the batch has at most two samples, yield nothing.
    """
    num_samples, few_samples = batch.num_samples, min(2, batch.num_samples)
    if not _can_shorten_sequences(batch.lengths, is_pair):
        if few_samples < num_samples:
            yield _cut_batch(batch, few_samples, None, is_pair)
        return
    length = batch.lengths[0]
    half, short = _shorter_length(length, length // 2), _shorter_length(length, min(FEW_TOKENS, length // 4))
    yield _cut_batch(batch, num_samples, (half, half), is_pair)
    yield _cut_batch(batch, few_samples, (short, short), is_pair)
    if is_pair:
        yield _cut_batch(batch, num_samples, (half, short), is_pair)


def extra_parts(batch: Batch, is_pair: bool) -> Iterator[Batch]:
    """Yield one more copy of `batch` for profiling, with a number of samples that no copy from `profiled_parts` has.

    A peak is a sum of three terms: attention's scores, other tensors of the batch, and the weights. The batch and the
    copies from `profiled_parts` determine the three terms, and this further size checks the fit.

    All copies from `profiled_parts` of a batch of one or two samples have as many samples as the batch. In this case,
    the copy from this function has twice as many. Yield nothing if the sequences are too short to be cut.
    """
    if _can_shorten_sequences(batch.lengths, is_pair):
        part_samples, quarters = (2, 3) if batch.num_samples > 2 else (2 * batch.num_samples, 1)
        length = _shorter_length(batch.lengths[0], quarters * batch.lengths[0] // 4)
        yield _cut_batch(batch, part_samples, (length, length), is_pair)


def _is_decoder_tensor(name: str) -> bool:
    """Return True if the tensor `name` in the batch of an encoder-decoder is as long as the decoder's sequence."""
    return name == "labels" or name.startswith("decoder_")


def _can_shorten_sequences(lengths: list[int], is_pair: bool) -> bool:
    return bool(lengths) and lengths[0] >= LEAST_TOKENS * len(lengths) * (2 if is_pair else 1)


def _cut_batch(batch: Batch, num_samples: int, tokens: tuple[int, int] | None, is_pair: bool) -> Batch:
    """Return a copy of `batch` with `num_samples` samples, cut to sequences of about `tokens` (first, second) tokens.

    If `is_pair`, the first number of `tokens` is for the encoder's sequence, and the second for the decoder's sequence.
    Otherwise, the first number is for all sequences. If `tokens` is None, no sequence is cut.

    Tensors of different lengths are cut to different lengths. The two sequences of a pair get different lengths even if
    their lengths in `batch` are equal.
    """
    lengths = batch.lengths

    def cut(shape: TensorShape) -> TensorShape:
        size = list(shape.size)
        if size[0] == batch.num_samples:
            size[0] = num_samples
        if (len(size) == 2 or shape.name in batch.vector_sequences) and tokens is not None:
            shorter = tokens[1] + len(lengths) if is_pair and _is_decoder_tensor(shape.name) else tokens[0]
            is_audio = size[1] in batch.audio_lengths
            size[1] = _cut_audio_length(size[1], shorter) if is_audio else shorter + lengths.index(size[1])
        return TensorShape(shape.name, tuple(size))

    return batch.resized([cut(shape) for shape in batch.shapes])


def _shorter_length(length: int, target: int) -> int:
    """Return a sequence length of about `target` tokens, to which a sequence of `length` tokens is cut.

    If `length` is a multiple of ALIGNED, and at least 3 * ALIGNED, the result is a multiple of ALIGNED. Otherwise the
    result is odd. A block may run different operators on aligned lengths than on others.
    """
    return max(ALIGNED, target // ALIGNED * ALIGNED) if length % ALIGNED == 0 and length >= 3 * ALIGNED else target | 1


def _keep_documents(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Restart position ids in `part`, a tensor cut from `whole`, if the cut has lost the documents in its rows.

    A row holds several documents if its position ids decrease or repeat somewhere: a new document begins there. Models
    mask other documents only if a row holds several. Therefore, if `whole` has such rows and `part` has none, return a
    copy of `part` in which a second document begins in the middle of each row. Otherwise return `part`.
    """

    def has_documents(positions: torch.Tensor) -> bool:
        return bool((positions.diff(dim=1) <= 0).any())

    middle = part.shape[1] // 2
    if not has_documents(whole) or has_documents(part) or middle == 0:
        return part
    return torch.cat([part[:, :middle], part[:, middle:] - part[:, middle : middle + 1]], dim=1)
