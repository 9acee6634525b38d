"""The sizes of a batch: which ones are alike, and which batch needs no more memory than another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.size_model import Shapes


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a batch."""

    name: str
    size: tuple[int, ...]


BatchShapes = tuple[TensorShape, ...]


def batch_shapes(batch: Mapping[str, Any]) -> BatchShapes:
    """The shapes of the tensors in `batch` that have any dimension, by name."""
    tensors = {name: t for name, t in sorted(batch.items()) if isinstance(t, torch.Tensor) and t.dim() > 0}
    return tuple(TensorShape(name, tuple(t.shape)) for name, t in tensors.items())


def to_plain(shapes: BatchShapes) -> Shapes:
    """As profiles have them."""
    return tuple((shape.name, shape.size) for shape in shapes)


def from_plain(shapes: Shapes) -> BatchShapes:
    """Of what profiles have."""
    return tuple(TensorShape(name, size) for name, size in shapes)


def bucket_of(shapes: BatchShapes) -> BatchShapes:
    """`shapes` with samples and lengths rounded up to powers of two: what one policy is made for.

    The sides of images are rounded too, and widths of features, which do not differ from batch to batch.
    """
    return tuple(replace(shape, size=tuple(_rounded(shape.size))) for shape in shapes)


def _rounded(size: tuple[int, ...]) -> Iterator[int]:
    fixed = _fixed(size)
    return (n if dim == fixed else _power_of_two(n) for dim, n in enumerate(size))


def _fixed(size: tuple[int, ...]) -> int | None:
    """The dimension that tells one sort of batch from another: how many images [B, N, C, H, W] a text has, of which its
    words tell too, or how many channels an image [B, C, H, W] has."""
    return 1 if len(size) > 3 else None


def is_alike(shapes: BatchShapes, other: BatchShapes) -> bool:
    """Whether batches of these shapes hold the same tensors but for samples, lengths and sides."""
    return [_sort_of(shape) for shape in shapes] == [_sort_of(shape) for shape in other]


def _sort_of(shape: TensorShape) -> tuple[str, int, int | None]:
    fixed = _fixed(shape.size)
    return shape.name, len(shape.size), None if fixed is None else shape.size[fixed]


def fits_in(shapes: BatchShapes, other: BatchShapes) -> bool:
    """Whether a batch of `shapes` is in no dimension larger than one of `other`, and otherwise alike.

    It may lack tensors, as a batch of text only does where others have images: what works on them stays idle.
    """
    theirs = {shape.name: shape for shape in other}
    with_same = [(mine, theirs.get(mine.name)) for mine in shapes]
    return all(
        match is not None
        and is_alike((mine,), (match,))
        and all(a <= b for a, b in zip(mine.size, match.size, strict=True))
        for mine, match in with_same
    )


def smallest_around(shapes: BatchShapes, other: BatchShapes) -> BatchShapes:
    """The smallest shapes that both of these, of one bucket, fit in."""
    return tuple(
        replace(mine, size=tuple(map(max, mine.size, theirs.size))) for mine, theirs in zip(shapes, other, strict=True)
    )


def num_elements(shapes: BatchShapes) -> int:
    return sum(prod(shape.size) for shape in shapes)


def resized(batch: Mapping[str, Any], before: BatchShapes, after: BatchShapes) -> dict[str, Any]:
    """`batch`, which has the shapes `before`, cut or repeated to the shapes `after`.

    A tensor that has no shape there, made from the batch on its way into the model, follows by its sizes.
    """
    sizes = {s.name: s.size for s in after}
    mapping = {
        old: new
        for s, t in zip(before, after, strict=True)
        for old, new in zip(s.size[:2], t.size[:2], strict=True)  # samples, and the length of a text
    }
    return {name: _resized(value, sizes.get(name), mapping) for name, value in batch.items()}


def _resized(value: Any, size: tuple[int, ...] | None, mapping: Mapping[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size = size if size is not None else tuple(mapping.get(n, n) for n in value.shape)
    for dim, (old, new) in enumerate(zip(value.shape, size, strict=True)):
        if old != new:
            value = value.index_select(dim, torch.arange(new, device=value.device) % old)
    return value


def describe(shapes: BatchShapes) -> str:
    return ", ".join(f"{shape.name} {'x'.join(map(str, shape.size))}" for shape in shapes) or "any"


def shapes_to_json(shapes: BatchShapes | None) -> list[Any] | None:
    return None if shapes is None else [[shape.name, list(shape.size)] for shape in shapes]


def shapes_from_json(record: list[Any] | None) -> BatchShapes | None:
    # Older checkpoints have a third entry.
    return None if record is None else tuple(TensorShape(name, tuple(size)) for name, size, *_ in record)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0
