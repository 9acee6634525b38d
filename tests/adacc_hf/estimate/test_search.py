"""The search for the largest: right for whatever does not fall, and with few looks where that is smooth."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.estimate.planning import FARTHEST, largest


@settings(deadline=None)  # the machine may be busy
@given(limit=st.integers(1, 2**20), start=st.integers(1, 3000), at_0=st.integers(-(10**12), 10**12), data=st.data())
def test_the_largest_is_found_for_whatever_does_not_fall(limit, start, at_0, data):
    answer = data.draw(st.integers(0, limit))
    slope, bend = data.draw(st.integers(1, 10**6)), data.draw(st.integers(0, 50))
    jump = data.draw(st.integers(0, 10**6))
    asked = []

    def excess(n):
        asked.append(n)
        return slope * (n - answer) + bend * max(0, n - answer) ** 2 + (jump if n > answer else 0)

    assert largest(excess, start, limit, {0: at_0}) == answer
    assert len(asked) == len(set(asked)), "each costs a trace"
    assert len(asked) <= 100, "halving at least every few looks"
    assert {answer, answer + 1} & set(range(1, limit + 1)) <= set(asked), "both sides of the answer were looked at"


@settings(deadline=None)
@given(
    start=st.integers(1, 200),
    slope=st.integers(10**6, 10**9),
    bend=st.integers(0, 10**7),
    static=st.integers(0, 10**11),
    room=st.integers(10**9, 10**11),
)
def test_polynomials_take_few_looks(start, slope, bend, static, room):
    asked = []

    def excess(n):
        asked.append(n)
        return static + slope * n + bend * n * n - (static + room)

    found = largest(excess, start, 2**20, {0: -room})
    assert excess(found) <= 0 < excess(found + 1)
    # The start, one more for the curve, the answer and its neighbour, and two to spare for rounding; the last two looks
    # are those just above. What is far off is come near to by factors.
    assert len(asked) - 2 <= 6 + max(0.0, math.log(max(found, 1) / start, FARTHEST))


def test_a_wrong_first_point_only_costs_looks():
    assert largest(lambda n: n - 700, 8, 1000, {0: 10**9, 3: -1}) == 700
    assert largest(lambda n: 1, 8, 1000, {}) == 0
    assert largest(lambda n: -1, 8, 1000, {}) == 1000
