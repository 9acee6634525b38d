"""A run under torch's profiler: its trace is whole, and the run is as without it."""

import logging

import pytest
import torch
from torch import profiler
from transformers import TrainerCallback

from adacc_hf import AdaccCallback

CPU = [profiler.ProfilerActivity.CPU]


class Steps(TrainerCallback):
    """Profiles steps of a run in one of several ways; `num_events` are those of each trace."""

    def __init__(self, way, at=(2,)):
        self.way, self.at, self.num_events = way, at, []
        self.profiled = None

    def count(self, profiled):
        self.num_events.append(len(profiled.events()))

    def begin(self, **schedule):
        given = profiler.schedule(**schedule) if schedule else None
        self.profiled = profiler.profile(activities=CPU, schedule=given, on_trace_ready=self.count)
        self.profiled.start()

    def on_train_begin(self, *args, **kwargs):
        if self.way == "scheduled":
            self.begin(wait=1, warmup=1, active=2, repeat=1)
        elif self.way == "two cycles":
            self.begin(wait=1, warmup=1, active=1, repeat=2)
        elif self.way == "late":
            self.begin(wait=4, warmup=1, active=1, repeat=1)
        elif self.way == "whole run":
            self.begin()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.way == "one step" and state.global_step in self.at:
            self.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if self.way in ("scheduled", "two cycles", "late"):
            self.profiled.step()
        elif self.way == "one step" and state.global_step - 1 in self.at:
            self.profiled.stop()

    def on_train_end(self, *args, **kwargs):
        if self.way == "whole run":
            self.profiled.stop()
        elif self.way != "one step":
            self.profiled.__exit__(None, None, None)


CASES = [
    ("scheduled", (), 1, True),
    ("two cycles", (), 2, True),
    ("late", (), 1, True),
    ("whole run", (), 1, False),
    ("one step", (1, 2, 3, 4), 4, True),
    ("one step", (5, 6, 7, 8), 4, True),
]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(("way", "at", "num_traces", "has_policy"), CASES)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_users_trace_is_whole(make_trainer, lossless, caplog, way, at, num_traces, has_policy, is_first):
    plain_steps, steps, callback = Steps(way, at), Steps(way, at), AdaccCallback(**{**lossless, "memory_budget": 0.5})
    plain = make_trainer([plain_steps], max_steps=12)
    plain.train()
    trainer = make_trainer([steps, callback] if is_first else [callback, steps], max_steps=12)
    with caplog.at_level(logging.WARNING, "adacc_hf"):
        trainer.train()
    assert len(steps.num_events) == len(plain_steps.num_events) == num_traces
    assert all(ours > 0.8 * theirs for ours, theirs in zip(steps.num_events, plain_steps.num_events, strict=True))
    assert (callback.policy is not None) is has_policy
    assert ("the profile waits" in caplog.text) is (way == "whole run"), "the others begin after the first forward"
    for ours, theirs in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        assert ours.get("loss") == theirs.get("loss")
        assert ours.get("grad_norm") == theirs.get("grad_norm")
    weights = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights)
