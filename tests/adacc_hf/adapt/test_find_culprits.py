"""Activations that cause a gradient's error, for made-up errors of the compressed activations."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adacc_hf.adapt.gradient_check import find_culprits

EACH = 0.1
"""Gradient error that each activation's codec adds, as INT4 does."""


class Gradient:
    """A gradient whose error is the sum of the compressed activations' errors, added as if they were independent.

    `degrades` are sets of activations: each adds `much` if all its activations are compressed.
    """

    def __init__(self, num, *degrades, much=2.0):
        self.num, self.degrades, self.much = num, degrades, much
        self.queries = []

    def error_without(self, bypassed):
        self.queries.append(bypassed)
        compressed = set(range(self.num)) - bypassed
        squares = [EACH**2] * len(compressed) + [self.much**2 for degrade in self.degrades if degrade <= compressed]
        return math.sqrt(sum(squares))

    def culprits(self, bound=0.5):
        return find_culprits(range(self.num), bound, self.error_without)


@pytest.mark.parametrize("much", [2.0, math.inf], ids=["twice-its-length", "not-finite"])
@pytest.mark.parametrize(
    ("degrades", "expected"),
    [([{3}], {3}), ([{2}, {5}], {2, 5}), ([{2}, {5}, {2, 5}], {2, 5}), ([{7}, {1}, {4}], {1, 4, 7})],
    ids=["one", "two", "a-pair-of-which-either-does", "three"],
)
def test_what_degrades_by_itself_is_found_and_nothing_else(degrades, expected, much):
    """An activation or set that degrades the gradient is found, and no other one. If queries and keys both degrade it,
    leaving out either one alone helps little."""
    gradient = Gradient(12, *degrades, much=much)
    assert gradient.culprits() == expected
    assert len(gradient.queries) <= 2 * 12 + 1


@given(errors=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=9), bound=st.floats(0.01, 1.0))
def test_where_errors_add_up_no_smaller_set_would_do(errors, bound):
    def error_without(bypassed):
        return math.sqrt(sum(error**2 for value, error in enumerate(errors) if value not in bypassed))

    assume(error_without(frozenset()) > bound)
    culprits = find_culprits(range(len(errors)), bound, error_without)
    assert error_without(culprits) <= bound
    worst = sorted(range(len(errors)), key=lambda value: -errors[value])
    # Leaving out the worst ones is the best result for that number; equal errors are summed up in another order.
    assert error_without(set(worst[: len(culprits) - 1])) > bound * (1 - 1e-12)


def test_none_is_found_where_no_activation_is_to_blame():
    assert find_culprits(range(5), 0.5, lambda bypassed: 0.6) is None
    assert find_culprits([], 0.5, lambda bypassed: 0.6) is None


@pytest.mark.parametrize("last", range(13))
def test_none_is_found_where_memory_ends_the_search(last):
    gradient = Gradient(6, {2}, {4})

    def error_without(bypassed):
        return None if len(gradient.queries) == last else gradient.error_without(bypassed)

    culprits = find_culprits(range(6), 0.5, error_without)
    assert culprits == (None if last < 6 + 2 else {2, 4})
