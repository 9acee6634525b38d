"""Shapes of the tensors in a batch, and comparison of batches."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.size_model import Shapes


def batch_shapes(batch: Mapping[str, Any]) -> Shapes:
    """Return (name, size) of the tensors that determine the size of `batch`, sorted by name: all but scalars and lists
    of indices, such as the boundaries of packed documents (`cu_seq_lens_q`)."""
    tensors = {name: t for name, t in sorted(batch.items()) if isinstance(t, torch.Tensor) and t.dim() > 0}
    others = list(tensors.values())
    return tuple((name, tuple(t.shape)) for name, t in tensors.items() if not _is_index_list(t, others))


def _is_index_list(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Return True if `tensor` is a list of indices into a larger tensor of the batch: it has one dimension, a length
    other than the number of samples, and fewer elements than another tensor of integers."""
    if tensor.dim() != 1 or not _has_integers(tensor):
        return False
    has_own_samples = any(other.dim() > 1 and other.shape[0] == len(tensor) for other in tensors)
    return not has_own_samples and any(_has_integers(other) and other.numel() > len(tensor) for other in tensors)


def _has_integers(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def fits_in(shapes: Shapes, other: Shapes) -> bool:
    """Return True if, for each tensor in `shapes`, the tensor of the same name in `other` is at least as large in each
    dimension, and of the same size in `_fixed_size`. `shapes` may lack tensors of `other`: in a batch of text without
    images, the image modules are idle."""
    sizes = dict(other)
    return all(
        len(size) == len(sizes.get(name, ()))
        and _fixed_size(size) == _fixed_size(sizes[name])
        and all(a <= b for a, b in zip(size, sizes[name], strict=True))
        for name, size in shapes
    )


def _fixed_size(size: tuple[int, ...]) -> int | None:
    """Return the size in which batches must be equal to fit in each other, or None: N, the images per sample, in
    [B, N, C, H, W], and C, the channels, in [B, C, H, W]."""
    return size[1] if len(size) > 3 else None


def num_elements(shapes: Shapes) -> int:
    """Return the total number of elements of all tensors with these shapes."""
    return sum(prod(size) for _, size in shapes)


def describe(shapes: Shapes) -> str:
    """Return the shapes as text for messages, for example "input_ids 4x128"."""
    return ", ".join(f"{name} {'x'.join(map(str, size))}" for name, size in shapes) or "any"
