"""`adacc plan --largest`: the largest batch and the longest sequence of five methods, and its time per token."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.cli import main
from adacc_hf.estimate.largest import LARGEST_METHODS, MAX_GROWTH, largest_fitting


@pytest.fixture
def largest(folder, capsys):
    """`largest(*options)`: what `adacc plan --largest` prints for 32 sequences."""

    def run(*options):
        assert main(["plan", "--model", folder, "--batch-size", "32", "--largest", "--dtype", "fp32", *options]) == 0
        return capsys.readouterr().out

    return run


def test_methods_reach_larger_shapes_one_after_the_other(largest, plan):
    record = json.loads(largest("--budget", "20MiB", "--json"))
    lengths = {method: each["seq_len"] for method, each in record["largest"].items()}
    assert tuple(lengths) == LARGEST_METHODS
    plain, full, tiled, exact, ours = lengths.values()
    assert 0 < plain < full <= tiled <= ours == 64
    assert full <= exact <= ours
    assert all(each["ms_per_token"] > 0 for each in record["largest"].values())
    at_limit = [each["is_at_limit"] for each in record["largest"].values()]
    assert at_limit == [length == 64 for length in lengths.values()]
    batches = [each["batch_size"] for each in record["largest"].values()]
    assert 0 < batches[0] < batches[1] <= batches[2]
    assert batches[1] <= batches[3] <= batches[4]
    options = ("--dtype", "fp32", "--budget", "20MiB", "--batch-size")
    at, beyond = (plan(*options, str(batches[4] + more))["fits"] for more in (0, 1))
    assert at
    assert not beyond


def test_a_budget_below_every_sequence_says_none(largest):
    text = largest("--budget", "8MiB", "--seq-len", "64")
    assert "longest sequence in batches of 32, per device within 8.00 MiB" in text
    assert "none" in text


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

    assert largest_fitting(excess, start, limit, at_0) == answer
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

    answer = largest_fitting(excess, start, 2**20, -room)
    assert excess(answer) <= 0 < excess(answer + 1)
    # The start, one more for the curve, the answer and its neighbour, and two to spare for rounding; the last two
    # evaluations are the assertions just above. The search approaches a distant answer by factors of MAX_GROWTH.
    assert len(evaluated) - 2 <= 6 + max(0.0, math.log(max(answer, 1) / start, MAX_GROWTH))
