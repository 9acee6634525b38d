"""Records of a model's blocks at other sizes than the profiled batch's, from which tapes of all sizes are made.

They are small: what the numbers of a tape are multiples of shows there as well, and takes next to no memory or time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from adacc_hf.blocks import Installation, Plainly
from adacc_hf.calls import call_name
from adacc_hf.execution.recording import Recording
from adacc_hf.memory import forward_loss
from adacc_hf.ranks import is_sharded
from adacc_hf.tapes.known_shapes import KnownShapes
from adacc_hf.tapes.library import TapeLibrary
from adacc_hf.tracking.shapes import BatchShapes, TensorShape, batch_shapes, resized

log = logging.getLogger(__name__)

SMALL = ((2, 11), (3, 24))
"""Samples and tokens of the other batches: odd, and a multiple of 8; both fewer than the profiled batch's."""


_NOT_TAKEN = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError)
"""What models raise at a batch whose parts do not fit together."""


class RecordSize:
    """The strategy that records every call of a block for a library; no backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, library: TapeLibrary) -> None:
        self.name = name
        self.library = library
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        recording = Recording(call_name(self.name, self.num_calls), block, args, kwargs)
        result = recording.run(fn)
        key = KnownShapes(watches_state=False).key(block, args, kwargs)
        self.library.remember(self.library.verified(recording.recorder), key.given_to(block), recording.name)
        recording.discard()
        return result


def record_other_sizes(
    model: nn.Module, batch: Mapping[str, Any], installation: Installation, library: TapeLibrary
) -> None:
    """Record every block on parts of `batch`, as far as the model takes such."""
    if is_sharded(installation.model):  # a forward that ends in its midst would leave other ranks waiting
        return
    is_pair = bool(getattr(getattr(installation.model, "config", None), "is_encoder_decoder", False))
    for smaller in _smaller_batches(batch, is_pair):
        for name, function in installation.blocks.items():
            function.strategy = RecordSize(name, library)
        installation.begin_step()
        try:
            forward_loss(model, smaller)
        except _NOT_TAKEN as error:  # of images, say, as many as the text has places for
            log.info("Adacc: the model takes no part of a batch (%s): sizes are recorded as they come", error)
            return
        finally:
            for function in installation.blocks.values():
                function.strategy = Plainly()


def _smaller_batches(batch: Mapping[str, Any], is_pair: bool) -> Iterator[dict[str, Any]]:
    """Parts of `batch`: fewer samples, where it has more than two, and fewer tokens."""
    shapes = batch_shapes(batch)
    samples = next((shape.size[0] for shape in shapes if len(shape.size) > 1), 1)
    lengths = sorted({shape.size[1] for shape in shapes if len(shape.size) == 2})
    for place, (few, short) in enumerate(SMALL):
        fewer = min(few, samples)
        if lengths and lengths[0] > 1 + len(SMALL):
            shorter = min(short, lengths[0] - len(SMALL) + place)
            after = tuple(_cut(shape, samples, fewer, lengths, shorter, is_pair) for shape in shapes)
        elif fewer < samples:
            after = tuple(_cut(shape, samples, fewer, [], 0, is_pair) for shape in shapes)
        else:
            continue
        yield _still_padded(batch, resized(batch, shapes, after), shapes)


def _cut(
    shape: TensorShape, samples: int, fewer: int, lengths: list[int], shorter: int, is_pair: bool
) -> TensorShape:
    """`shape` with fewer samples and tokens. Each length of the batch gets one of its own, and so do the two of a pair
    of texts that happen to be of one length."""
    size = list(shape.size)
    if size[0] == samples:
        size[0] = fewer
    if len(size) == 2 and lengths:
        is_second = is_pair and (shape.name == "labels" or shape.name.startswith("decoder_"))
        size[1] = shorter + lengths.index(size[1]) + (len(lengths) if is_second else 0)
    return TensorShape(shape.name, tuple(size))


def _still_padded(
    batch: Mapping[str, Any], smaller: dict[str, Any], shapes: BatchShapes
) -> dict[str, Any]:
    """`smaller` with a masked token where `batch` has some: models leave out a mask that masks nothing."""
    for shape in shapes:
        mask = smaller[shape.name]
        if shape.name.endswith("attention_mask") and mask.dim() == 2 and bool(mask.all()) and not batch[shape.name].all():
            last = 0 if not bool(batch[shape.name][:, 0].all()) else -1
            smaller[shape.name] = mask = mask.clone()
            mask[0, last] = torch.zeros((), dtype=mask.dtype)
    return smaller
