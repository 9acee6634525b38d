"""Images in the batches of a fake vision-language model (`adacc plan --images`).

Only models whose images all have the size in the vision tower's configuration are supported, for example LLaVA,
PaliGemma and Gemma 3. If a model accepts images of any size, its code computes shapes from the sizes of the images,
which fake tensors do not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig

_LEAVE_OUT = (
    "leave out this option, and plan the language model alone (the text_config in the model's config), with the image "
    "tokens counted in --seq-len"
)
"""Advice of error messages."""
_DISABLE_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Environment variable of Transformers that disables its checks of tensors' values, such as the number of image tokens
in a text. Fake tensors have no values."""


def image_size(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return (channels, height, width) of an image of the model.

    Raises ValueError if the model has no vision tower, or if its images have no fixed size.
    """
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "image_size", None)
    if size is None:
        reason = "has no vision tower" if vision is None else "accepts images of any size"
        raise ValueError(
            f"--images: {type(config).__name__} {reason}, and only images of a fixed size are planned: {_LEAVE_OUT}"
        )
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(vision, "num_channels", 3), height, width


def pixel_values(config: PretrainedConfig, num_images: int) -> torch.Tensor:
    """Return the pixels of `num_images` images, float32 as image processors make them."""
    return torch.zeros((num_images, *image_size(config)))


def tokens_per_image(model: Any, config: PretrainedConfig) -> int:
    """Return the number of tokens that an image takes in a sequence, from the features of one fake image.

    Raises ValueError if the model needs more than the pixels of an image.
    """
    try:
        with torch.no_grad():
            features = model.get_image_features(pixel_values=pixel_values(config, 1))
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"--images: the images of {type(model).__name__} cannot be planned, because it needs more than their "
            f"pixels ({error}): {_LEAVE_OUT}"
        ) from error
    features = getattr(features, "pooler_output", features)
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return sum(part.numel() for part in parts) // config.get_text_config().hidden_size


@contextmanager
def unchecked_placeholders() -> Iterator[None]:
    """Disable Transformers' checks of the number of image tokens inside the `with` block."""
    before = os.environ.get(_DISABLE_CHECKS)
    os.environ[_DISABLE_CHECKS] = "1"
    try:
        yield
    finally:
        del os.environ[_DISABLE_CHECKS]
        if before is not None:
            os.environ[_DISABLE_CHECKS] = before
