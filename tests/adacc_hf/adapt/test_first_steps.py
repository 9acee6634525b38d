"""Times of a run's first steps: what each step ran under, and what training waited for."""

from __future__ import annotations

import json

import pytest

from adacc_hf import AdaccCallback
from adacc_hf.adapt import events as first_steps_module
from adacc_hf.adapt.events import (
    CHECKING,
    CHECKPOINT,
    FOLLOWING,
    MEASURING,
    NUM_FIRST_STEPS,
    RECORD_KEYS,
    TRACKING,
    FirstSteps,
)
from adacc_hf.artifacts.files import FIRST_STEPS_FILE
from adacc_hf.torch_glue.progress import PROFILING, SOLVING, Interruption


def activities(callback: AdaccCallback) -> list[str]:
    return [record["activity"] for record in callback.first_steps]


def test_the_first_step_has_the_profile_and_the_policy(make_trainer, tmp_path):
    """The profiled step runs under torch's checkpoint, and the next under the policy."""
    callback = AdaccCallback(memory_budget=0.6, actions=("retain", "recompute"))
    make_trainer([callback], max_steps=NUM_FIRST_STEPS + 2).train()
    records = callback.first_steps
    assert [record["step"] for record in records] == list(range(1, NUM_FIRST_STEPS + 1))
    assert all(record.keys() == RECORD_KEYS for record in records)
    assert all(record["seconds"] >= record["profiling_s"] + record["solving_s"] for record in records)
    first = records[0]
    assert first["events"] == ["policy"]
    assert first["solving_s"] > 0
    assert not any(record["profiling_s"] for record in records)
    assert activities(callback)[:2] == [CHECKPOINT, CHECKING]
    assert FOLLOWING in activities(callback)
    assert json.loads((tmp_path / "run" / FIRST_STEPS_FILE).read_text()) == records


def test_tracking_steps_are_named(make_trainer):
    callback = AdaccCallback(memory_budget=0.45, actions=("retain", "compress"), min_compress_bytes=4096)
    make_trainer([callback], max_steps=6).train()
    tracked = [event["step"] for event in callback.history if event["event"] == "tracking"]
    assert tracked == [2, 4]
    assert [record["step"] for record in callback.first_steps if record["activity"] == TRACKING] == tracked


def test_the_measured_step_and_its_new_policy_are_named(make_trainer):
    callback = AdaccCallback(memory_budget="1GiB", actions=("retain", "recompute"), tracking="off")
    make_trainer([callback], max_steps=6).train()
    measured = [event["step"] for event in callback.history if "measured_peak_bytes" in event]
    assert measured
    assert [r["step"] for r in callback.first_steps if r["activity"] == MEASURING] == measured
    changes = [event["step"] for event in callback.history if event["event"] == "change"]
    assert [r["step"] for r in callback.first_steps if "change" in r["events"]] == changes


@pytest.fixture
def timer(monkeypatch):
    """Let a step take 2 s, with 0.5 s of profiling and two times 0.25 s of solving."""
    now = iter(range(0, 1000, 2))
    waits = [Interruption(PROFILING, 0.0, 0.5), Interruption(SOLVING, 0.0, 0.25), Interruption(SOLVING, 0.0, 0.25)]
    monkeypatch.setattr(first_steps_module.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(first_steps_module, "interruptions_since", lambda started: waits)


@pytest.mark.usefixtures("timer")
def test_interruptions_are_added_up_by_kind():
    steps, history = FirstSteps(), [{"step": 0, "event": "policy"}]
    steps.begin_step(history)
    history += [{"step": 1, "event": "tracking"}, {"step": 1, "event": "change"}]
    assert steps.end_step(1, TRACKING, history)
    assert steps.records == [
        {"step": 1, "activity": TRACKING, "seconds": 2, "profiling_s": 0.5, "solving_s": 0.5, "events": ["change"]}
    ]


@pytest.mark.usefixtures("timer")
def test_later_steps_are_not_timed():
    steps = FirstSteps()
    for step in range(1, NUM_FIRST_STEPS + 3):
        steps.begin_step([])
        assert steps.end_step(step, FOLLOWING, []) == (step <= NUM_FIRST_STEPS)
    assert len(steps.records) == NUM_FIRST_STEPS
