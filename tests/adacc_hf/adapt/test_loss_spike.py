"""Suspicious figures in logs, and the number of logs for which they stay suspicious."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.adapt.tracking import MIN_LOSSES, WINDOW, LossHistory

STEADY = [3.0, 3.1, 2.9, 3.05, 2.95] * 4


def reasons(losses):
    history = LossHistory()
    return [history.check(loss, None) for loss in losses]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_suspicious_at_once_and_enters_no_median(name, value):
    history = LossHistory()
    figures = {"loss": 3.0, "grad_norm": 1.0} | {name: value}
    assert history.check(figures["loss"], figures["grad_norm"]) == f"{name} is {value}"
    later = [*STEADY[: MIN_LOSSES - 1], 100.0]
    assert [history.check(loss, None) for loss in later] == [None] * MIN_LOSSES


def test_a_spike_is_found_and_what_came_before_is_not():
    assert reasons([*STEADY, 9.0, 3.0]) == [None] * 20 + ["loss 9 is 3.0 times the median of the last 16", None]


def test_a_loss_that_stays_where_it_rose_to_is_normal_half_a_window_later():
    """A loss that stays high is normal after half a window. Otherwise, after a change of the data, each further log
    would cause a check of all blocks."""
    results = reasons([*STEADY, *[9.0] * 20])
    assert all(results[20 : 20 + WINDOW // 2])
    assert not any(results[20 + WINDOW // 2 + 1 :])


@given(st.lists(st.floats(-1.0, 1.0), min_size=MIN_LOSSES, max_size=WINDOW), st.floats(1.0, 4.0))
def test_nothing_within_the_range_of_noise_around_zero_is_a_spike(losses, scale):
    """Values within the noise around zero are no spike: if losses alternate in sign, the noise is their size."""
    signs = [scale * (-1) ** number + loss / 4 for number, loss in enumerate(losses)]
    assert reasons([*signs, 1.5 * scale])[-1] is None


@pytest.mark.parametrize(("loss", "is_spike"), [(-4.0, False), (1.0, True)])
def test_losses_below_zero_spike_upwards(loss, is_spike):
    (*_, reason) = reasons([-5.0, -5.1, -4.9, -5.05, loss])
    assert (reason == f"loss {loss:.4g} is far above -5.025, the median of the last 4") == is_spike
    assert (reason is not None) == is_spike
