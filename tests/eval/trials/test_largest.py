"""The search for the largest batch: right for any growth of memory, and in few trials where it grows as it does."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.eval.trials.largest import MAX_GUESSES, Tried, largest

LIMIT, STATIC = 1000, 200

Peaks = Callable[[int], int | None]


def search(fitting: int, most: int, first: int, peaks: Peaks) -> tuple[int, list[int]]:
    """What is found where `fitting` is the largest, and which batches were tried."""
    asked: list[int] = []

    def trial(batch: int) -> Tried:
        asked.append(batch)
        return Tried(batch, batch <= fitting, STATIC, peaks(batch))

    return largest(trial, LIMIT, most, first), asked


@given(
    fitting=st.integers(0, 300),
    most=st.integers(1, 300),
    first=st.integers(1, 400),
    peaks=st.lists(st.none() | st.integers(0, 3000), min_size=301, max_size=301),
)
def test_it_finds_the_largest_whatever_the_bytes(fitting: int, most: int, first: int, peaks: list[int | None]) -> None:
    found, asked = search(fitting, most, first, peaks.__getitem__)
    assert found == min(fitting, most)
    assert len(asked) == len(set(asked)) <= MAX_GUESSES + 2 * most.bit_length() + 1
    assert all(1 <= batch <= most for batch in asked)


@given(per_sequence=st.integers(3, 800), first=st.integers(1, 300))
def test_bytes_in_proportion_take_three_trials(per_sequence: int, first: int) -> None:
    fitting = (LIMIT - STATIC) // per_sequence
    found, asked = search(fitting, 4096, first, lambda batch: STATIC + per_sequence * batch)
    assert found == fitting
    assert len(asked) <= 3


def test_a_policy_that_uses_up_its_budget_is_searched_by_longer_steps() -> None:
    found, asked = search(20, 4096, 10, lambda batch: LIMIT)
    assert found == 20
    assert asked == [10, 11, 13, 17, 25, 21, 19, 20]


def test_refusals_without_bytes_are_bisected() -> None:
    found, asked = search(5, 100, 1, lambda batch: None)
    assert found == 5
    assert asked == [1, 2, 4, 8, 6, 5]
