"""RunContext: statements on memory in the history, and the guard's setting."""

import math

import pytest

from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.corrections import Corrections
from adacc_hf.adapt.events import MemoryNoted
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.artifacts.config import AdaccConfig


def context_with(events):
    config = AdaccConfig(memory_budget=0.6)
    return RunContext(config, 2, events.append, LossGuard(config), Corrections(config))


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
