"""Search for the largest fitting integer: fits for any non-decreasing excess, with few evaluations if smooth."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.estimate.integer_search import MAX_GROWTH, largest_fitting


@settings(deadline=None)  # the machine may be busy
@given(limit=st.integers(1, 2**20), start=st.integers(1, 3000), at_0=st.integers(-(10**12), 10**12), data=st.data())
def test_the_result_fits_for_any_non_decreasing_excess(limit, start, at_0, data):
    answer = data.draw(st.integers(0, limit))
    slope, bend = data.draw(st.integers(1, 10**6)), data.draw(st.integers(0, 50))
    jump = data.draw(st.integers(0, 10**6))
    evaluated = []

    def excess(n):
        evaluated.append(n)
        return slope * (n - answer) + bend * max(0, n - answer) ** 2 + (jump if n > answer else 0)

    result = largest_fitting(excess, start, limit, {0: at_0})
    assert result == answer
    assert len(evaluated) == len(set(evaluated)), "each evaluation costs a trace"
    assert len(evaluated) <= 100, "the interval is halved at least every few evaluations"


@settings(deadline=None)
@given(
    start=st.integers(1, 200),
    slope=st.integers(10**6, 10**9),
    bend=st.integers(0, 10**7),
    static=st.integers(0, 10**11),
    room=st.integers(10**9, 10**11),
)
def test_polynomials_take_few_evaluations(start, slope, bend, static, room):
    evaluated = []

    def excess(n):
        evaluated.append(n)
        return static + slope * n + bend * n * n - (static + room)

    answer = largest_fitting(excess, start, 2**20, {0: -room})
    assert excess(answer) <= 0 < excess(answer + 1)
    # The start, one more for the curve, the answer and its neighbour, and two to spare for rounding; the last two
    # evaluations are the assertions just above. The search approaches a distant answer by factors of MAX_GROWTH.
    assert len(evaluated) - 2 <= 6 + max(0.0, math.log(max(answer, 1) / start, MAX_GROWTH))


def test_a_wrong_first_point_only_costs_evaluations():
    assert largest_fitting(lambda n: n - 700, 8, 1000, {0: 10**9, 3: -1}) == 700
    assert largest_fitting(lambda n: 1, 8, 1000, {}) == 0
    assert largest_fitting(lambda n: -1, 8, 1000, {}) == 1000
