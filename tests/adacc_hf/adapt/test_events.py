"""Events: the records that they become in the history."""

from dataclasses import FrozenInstanceError, fields

import pytest

from adacc_hf.adapt.events import (
    Event,
    GuardVerdict,
    MemoryNoted,
    OutliersTracked,
    PolicyChanged,
    PolicySet,
    predictions,
)
from adacc_hf.solve.simple_policies import uniform_policy


def test_a_record_has_the_step_the_name_and_the_figures_that_are_known():
    event = MemoryNoted(step=3, measured_peak_bytes=0, corrected=False)
    assert event.to_record() == {"step": 3, "event": "memory", "measured_peak_bytes": 0, "corrected": False}
    assert list(event.to_record())[:2] == ["step", "event"]


def test_figures_of_a_policy_are_fields_of_its_events(gpt2_like_profile):
    policy = uniform_policy(gpt2_like_profile(), "recompute")
    figures = predictions(policy)
    assert figures == {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
    }
    assert PolicySet(step=1, **figures).to_record() == {"step": 1, "event": "policy", **figures}
    for event_class in (PolicyChanged, MemoryNoted):
        assert figures.keys() <= {field.name for field in fields(event_class)}


def test_each_event_has_a_name_of_its_own():
    events = [PolicySet, PolicyChanged, OutliersTracked, MemoryNoted, GuardVerdict]
    assert sorted(Event.__subclasses__(), key=repr) == sorted(events, key=repr)
    assert [event.name for event in events] == ["policy", "change", "tracking", "memory", "guard"]


def test_an_event_does_not_change():
    event = GuardVerdict(step=1, reason="a spike", verdict="healthy")
    with pytest.raises(FrozenInstanceError):
        event.step = 2
