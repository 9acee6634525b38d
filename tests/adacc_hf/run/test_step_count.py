"""Number of a block's calls in a step: the end of a step, and the counter's state on the graph."""

from types import SimpleNamespace

import pytest
import torch

from adacc_hf.run.blocks import StepCount


@pytest.fixture
def count():
    return StepCount()


def call(count, expected=3):
    """Return (number of the call that begins, the call's result)."""
    number = count.next_of(expected)
    result = torch.ones(2, requires_grad=True) * 2
    count.returned((result, None))
    return number, result


def test_a_second_backward_through_the_same_call_ends_no_other_step(count):
    _, first = call(count)
    first.sum().backward(retain_graph=True)
    calls = [call(count)]
    first.sum().backward()
    calls.append(call(count))
    assert [number for number, _ in calls] == [0, 1]


def test_a_step_whose_graphs_are_gone_has_ended(count):
    number, result = call(count)
    other, other_result = call(count)
    del result
    assert (number, other) == (0, 1)
    assert count.next_of(3) == 2, "the other call's graph is there"
    del other_result
    assert count.next_of(3) == 0


def test_calls_beyond_those_that_are_expected_begin_anew(count):
    calls = [call(count, expected=2) for _ in range(5)]
    assert [number for number, _ in calls] == [0, 1, 0, 1, 0]


def test_calls_without_gradients_are_counted_round(count):
    """Calls without gradients are counted modulo the expected number, because a frozen block has no backward that ends
    a step."""
    numbers = []
    for _ in range(5):
        numbers.append(count.next_of(2))
        count.returned(SimpleNamespace())
    assert numbers == [0, 1, 0, 1, 0]
