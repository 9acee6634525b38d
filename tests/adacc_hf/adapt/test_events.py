"""Events: the records that they become in the history."""

from dataclasses import fields

from adacc_hf.adapt.events import MemoryNoted, PolicyChanged, PolicySet, predictions
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
