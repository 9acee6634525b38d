"""Cache of generated rows as an Arrow file, which later runs with the same key reuse."""

from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset, Features
from datasets.exceptions import DatasetGenerationError


def cached_rows(
    generator: Callable[..., Iterator[dict[str, Any]]], features: Features, cache_dir: str, key: str, **kwargs: Any
) -> Dataset:
    """Return the rows of the dataset that `generator(**kwargs)` yields, from the cached file if there is one. `key`
    (hex digits) identifies everything that the rows depend on. If the generator raises an exception, the exception is
    raised unchanged, and no file remains in the cache."""
    try:
        return Dataset.from_generator(generator, features, cache_dir, gen_kwargs=kwargs, fingerprint=key)
    except DatasetGenerationError as error:  # the wrapper exception has no information beyond its cause
        raise (error.__cause__ or error) from None
