"""Rows that are generated once, and read from the cache afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from arrow_cache import cached_rows
from datasets import Features, Value

FEATURES = Features({"n": Value("int64")})


def numbers(count: int) -> Iterator[dict[str, int]]:
    for n in range(count):
        yield {"n": n}


def failing(count: int) -> Iterator[dict[str, int]]:
    yield {"n": 0}
    raise LookupError(f"row {count} is missing")


def test_rows_of_a_key_are_generated_once(tmp_path: Path):
    first = cached_rows(numbers, FEATURES, str(tmp_path), "a1", count=3)
    assert first["n"][:] == [0, 1, 2]
    # The generator would fail, so that these rows must come from the cache.
    cached = cached_rows(failing, FEATURES, str(tmp_path), "a1", count=3)
    assert cached["n"][:] == [0, 1, 2]
    other = cached_rows(numbers, FEATURES, str(tmp_path), "b2", count=2)
    assert other["n"][:] == [0, 1]


def test_an_error_of_the_generator_is_raised_as_it_is_and_leaves_no_rows(tmp_path: Path):
    with pytest.raises(LookupError, match="row 3 is missing") as error_info:
        cached_rows(failing, FEATURES, str(tmp_path), "a1", count=3)
    assert error_info.value.__cause__ is None
    assert not list(tmp_path.rglob("*.arrow"))
    assert cached_rows(numbers, FEATURES, str(tmp_path), "a1", count=3)["n"][:] == [0, 1, 2]
