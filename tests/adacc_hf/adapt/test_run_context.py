"""RunContext: the budget of new policies, and statements on memory in the history."""

import math

import pytest

from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.events import MemoryNoted
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.artifacts.config import AdaccConfig


def context_with(events, **guard_state):
    config = AdaccConfig(memory_budget=0.6)
    return RunContext(config=config, policy_step=2, note=events.append, guard=LossGuard(config, **guard_state))


def test_a_tightened_budget_takes_the_place_of_the_config_s():
    context = context_with([])
    assert context.memory_budget == 0.6
    context.tightened = 12345
    assert context.memory_budget == 12345
    assert context.config.memory_budget == 0.6


def test_codecs_that_are_switched_off_are_the_guard_s():
    assert context_with([]).switched_off == frozenset()
    assert context_with([], switched_off=["a codec"]).switched_off == {"a codec"}


def test_a_statement_on_memory_belongs_to_the_current_step():
    events = []
    context = context_with(events)
    context.step = 7
    context.note_memory("there is no room")
    assert events == [MemoryNoted(step=7, reason="there is no room")]


@pytest.mark.parametrize("tracking", ["exponential", "off"])
def test_gradients_are_checked_after_a_strange_loss_unless_nothing_is_tracked(tracking):
    guard = LossGuard(AdaccConfig(tracking=tracking))
    guard.logged({"loss": math.nan}, is_lossy=True)
    assert (guard.suspicion is None) == (tracking == "off")


def test_contexts_share_no_state():
    one, other = context_with([]), context_with([])
    one.missing_bytes["forward"] = 1
    assert other.missing_bytes == {}
    assert one.warnings is not other.warnings
