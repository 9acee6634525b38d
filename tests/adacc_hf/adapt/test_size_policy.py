"""The extra time of steps relative to normal steps, computed from invented times."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.adapt.size_policy import ENOUGH, MAX_STEPS, StepTimes


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 50.0)), max_size=40), st.integers(0, 40))
def test_all_extra_time_is_told_once_whatever_the_order(steps, change_at):
    """Normal steps take 10 ms. Steps before the first sufficient number of normal ones are compared later."""
    times, extra_ms_sum = StepTimes(), 0.0
    for number, (is_normal, extra_ms) in enumerate(steps):
        if number == change_at:
            times.start_over()
        extra_ms_sum += times.add_normal(10.0) if is_normal else times.add_other(10.0 + extra_ms)
    has_reference = sum(is_normal for is_normal, _ in steps) >= ENOUGH
    expected = sum(extra for is_normal, extra in steps if not is_normal) if has_reference else 0.0
    assert math.isclose(extra_ms_sum, expected, abs_tol=1e-9)


def test_the_median_is_that_of_the_latest_steps_under_the_present_plans():
    times = StepTimes()
    assert times.median_ms is None
    for ms in [1.0] * MAX_STEPS + [3.0] * MAX_STEPS:
        times.add_normal(ms)
    assert (times.median_ms, len(times.ms)) == (3.0, MAX_STEPS)
    times.start_over()
    assert times.median_ms is None
    assert times.add_other(5.0) == 2.0, "the reference is the normal steps under earlier plans"


def test_steps_are_compared_with_those_around_them():
    """The machine becomes half as fast. The second step is as much slower than its neighbours as the first."""
    times = StepTimes()
    extra_times = []
    for ms in (10.0, 20.0):
        for _ in range(20):
            times.add_normal(ms)
        extra_times.append(times.add_other(ms + 7.0))
    assert extra_times == [7.0, 7.0]


def test_steps_that_are_never_compared_are_not_kept():
    """A run that tracks at every step has no normal steps."""
    times = StepTimes()
    assert [times.add_other(10.0) for _ in range(100)] == [0.0] * 100
    assert not any(len(value) for value in vars(times).values() if not isinstance(value, (int, float)))
    assert [times.add_normal(8.0) for _ in range(ENOUGH)] == [0.0] * (ENOUGH - 1) + [200.0]
