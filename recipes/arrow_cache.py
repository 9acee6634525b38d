"""Rows from a generator, kept as an Arrow file that is reused as long as its key is the same."""

from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset, Features
from datasets.exceptions import DatasetGenerationError


def cached_rows(
    generator: Callable[..., Iterator[dict[str, Any]]], features: Features, cache_dir: str, key: str, **kwargs: Any
) -> Dataset:
    """The rows of `generator(**kwargs)`; `key` (hex digits) stands for all that they depend on.

    An error of the generator comes out as itself, and leaves no file behind.
    """
    try:
        return Dataset.from_generator(generator, features, cache_dir, gen_kwargs=kwargs, fingerprint=key)
    except DatasetGenerationError as error:  # datasets' wrapper says nothing that its cause does not
        raise (error.__cause__ or error) from None
