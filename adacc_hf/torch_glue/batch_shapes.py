"""Shapes of the tensors in a batch, and comparison of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.size_model import Shapes


@dataclass(frozen=True)
class TensorShape:
    """Name and shape of one tensor of a batch."""

    name: str
    size: tuple[int, ...]


BatchShapes = tuple[TensorShape, ...]


def batch_shapes(batch: Mapping[str, Any]) -> BatchShapes:
    """Return the shapes of the tensors that determine the size of `batch`, sorted by name: all but scalars and lists of
    indices, such as the boundaries of packed documents (`cu_seq_lens_q`)."""
    tensors = {name: t for name, t in sorted(batch.items()) if isinstance(t, torch.Tensor) and t.dim() > 0}
    others = list(tensors.values())
    return tuple(TensorShape(name, tuple(t.shape)) for name, t in tensors.items() if not _is_index_list(t, others))


def _is_index_list(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Return True if `tensor` is a list of indices into a larger tensor of the batch: it has one dimension, a length
    other than the number of samples, and fewer elements than another tensor of integers."""
    if tensor.dim() != 1 or not _has_integers(tensor):
        return False
    has_own_samples = any(other.dim() > 1 and other.shape[0] == len(tensor) for other in tensors)
    return not has_own_samples and any(_has_integers(other) and other.numel() > len(tensor) for other in tensors)


def _has_integers(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def to_profile_shapes(shapes: BatchShapes) -> Shapes:
    """Convert batch shapes to (name, size) pairs, the form in which profiles and policies store them."""
    return tuple((shape.name, shape.size) for shape in shapes)


def from_profile_shapes(shapes: Shapes) -> BatchShapes:
    """Convert (name, size) pairs, the form in which profiles and policies store shapes, to batch shapes."""
    return tuple(TensorShape(name, size) for name, size in shapes)


def _fixed_dimension(size: tuple[int, ...]) -> int | None:
    """Return the index of the dimension in which batches fit in each other only if they have the same size, or None:
    that of N, the images per sample, in [B, N, C, H, W], and of C, the channels, in [B, C, H, W]."""
    return 1 if len(size) > 3 else None


def has_same_tensors(shapes: BatchShapes, other: BatchShapes) -> bool:
    """Return True if two batches of these shapes have tensors of the same names and numbers of dimensions, and of the
    same sizes in `_fixed_dimension`."""
    return [_shape_signature(shape) for shape in shapes] == [_shape_signature(shape) for shape in other]


def _shape_signature(shape: TensorShape) -> tuple[str, int, int | None]:
    fixed = _fixed_dimension(shape.size)
    return shape.name, len(shape.size), None if fixed is None else shape.size[fixed]


def fits_in(shapes: BatchShapes, other: BatchShapes) -> bool:
    """Return True if, for each tensor in `shapes`, the tensor of the same name in `other` is at least as large in each
    dimension. `shapes` may lack tensors of `other`: in a batch of text without images, the image modules are idle."""
    other_by_name = {shape.name: shape for shape in other}
    return all(
        (match := other_by_name.get(shape.name)) is not None
        and has_same_tensors((shape,), (match,))
        and all(a <= b for a, b in zip(shape.size, match.size, strict=True))
        for shape in shapes
    )


def num_elements(shapes: BatchShapes) -> int:
    """Return the total number of elements of all tensors with these shapes."""
    return sum(prod(shape.size) for shape in shapes)


def describe(shapes: BatchShapes) -> str:
    """Return the shapes as text for messages, for example "input_ids 4x128"."""
    return ", ".join(f"{shape.name} {'x'.join(map(str, shape.size))}" for shape in shapes) or "any"
