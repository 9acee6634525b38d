"""A run under torch's profiler: the trace is complete, and training equals a run without the profiler."""

import logging

import pytest
import torch
from torch import profiler
from transformers import TrainerCallback

from adacc_hf import AdaccCallback

CPU = [profiler.ProfilerActivity.CPU]


class Steps(TrainerCallback):
    """Callback that profiles steps of a run with one of several setups."""

    def __init__(self, setup, steps_to_profile=(2,)):
        self.setup, self.steps_to_profile, self.num_events = setup, steps_to_profile, []
        self.profiled = None

    def count(self, profiled):
        self.num_events.append(len(profiled.events()))

    def begin(self, **schedule):
        torch_schedule = profiler.schedule(**schedule) if schedule else None
        self.profiled = profiler.profile(activities=CPU, schedule=torch_schedule, on_trace_ready=self.count)
        self.profiled.start()

    def on_train_begin(self, *args, **kwargs):
        if self.setup == "scheduled":
            self.begin(wait=1, warmup=1, active=2, repeat=1)
        elif self.setup == "two cycles":
            self.begin(wait=1, warmup=1, active=1, repeat=2)
        elif self.setup == "late":
            self.begin(wait=4, warmup=1, active=1, repeat=1)
        elif self.setup == "whole run":
            self.begin()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.setup == "one step" and state.global_step in self.steps_to_profile:
            self.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if self.setup in ("scheduled", "two cycles", "late"):
            self.profiled.step()
        elif self.setup == "one step" and state.global_step - 1 in self.steps_to_profile:
            self.profiled.stop()

    def on_train_end(self, *args, **kwargs):
        if self.setup == "whole run":
            self.profiled.stop()
        elif self.setup != "one step":
            self.profiled.__exit__(None, None, None)


CASES = [
    ("scheduled", (), 1, True, True),
    ("two cycles", (), 2, True, False),
    ("late", (), 1, True, False),
    ("whole run", (), 1, False, True),
    ("whole run", (), 1, False, False),
    ("one step", (1, 2, 3, 4), 4, True, True),
    ("one step", (5, 6, 7, 8), 4, True, False),
]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(("setup", "steps_to_profile", "num_traces", "has_policy", "is_first"), CASES)
def test_a_users_trace_is_whole(
    make_trainer, lossless, caplog, setup, steps_to_profile, num_traces, has_policy, is_first
):
    plain_steps, steps, callback = (
        Steps(setup, steps_to_profile),
        Steps(setup, steps_to_profile),
        AdaccCallback(**{**lossless, "memory_budget": 0.5}),
    )
    plain = make_trainer([plain_steps], max_steps=12)
    plain.train()
    trainer = make_trainer([steps, callback] if is_first else [callback, steps], max_steps=12)
    with caplog.at_level(logging.WARNING, "adacc_hf"):
        trainer.train()
    assert len(steps.num_events) == len(plain_steps.num_events) == num_traces
    assert all(
        num_events > 0.8 * plain_num_events
        for num_events, plain_num_events in zip(steps.num_events, plain_steps.num_events, strict=True)
    )
    assert (callback.policy is not None) is has_policy
    assert ("the profile waits" in caplog.text) is (setup == "whole run"), (
        "the other setups begin after the first forward"
    )
    for log, plain_log in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        assert log.get("loss") == plain_log.get("loss")
        assert log.get("grad_norm") == plain_log.get("grad_norm")
    weights = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(tensor, plain_tensor) for tensor, plain_tensor in weights)
