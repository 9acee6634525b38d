"""Measurements of real runs."""

import pytest
import torch

from adacc_hf.price import measurement, timing
from adacc_hf.price.profiler import profile_model


@pytest.fixture(autouse=True, scope="module")
def counted_times():
    """Keep measured times."""


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    """A step is timed between two device synchronizations, so that earlier work is excluded and its own work
    included."""
    events = []
    monkeypatch.setattr(timing, "wait_for", lambda device: events.append(f"wait for {device}"))
    times = [timing.seconds_of(lambda: events.append("step"), torch.device("cpu"), iter([1.0, 3.5]).__next__)]
    assert times == [2.5]
    assert events == ["wait for cpu", "step", "wait for cpu"]


def test_the_step_whose_memory_is_measured_is_timed(monkeypatch, toy_model, toy_batch):
    seconds = iter([1.0, 3.0])
    monkeypatch.setattr(measurement, "seconds_at", lambda device: next(seconds))
    profile = profile_model(toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh())), toy_batch())
    assert next(seconds, None) is None
    assert profile.step_ms == pytest.approx(2000.0)


def test_a_head_is_warmed_up_and_one_interruption_decides_nothing(monkeypatch, tiny_gpt2, token_batch):
    """Heads are warmed up and timed by a median. A kernel loaded in the first run would lead to the other head."""
    milliseconds = {"plain": [500.0, 4.0, 90.0, 4.0], "chunked": [9.0, 5.0, 5.0, 5.0]}
    clock, runs = [0.0], {name: iter(times) for name, times in milliseconds.items()}

    def priced(name, compute):
        def run(loss):
            clock[0] += next(runs[name]) / 1e3
            return compute(loss)

        return run

    monkeypatch.setattr(timing.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(
        measurement, "PRICED_HEADS", {name: priced(name, head) for name, head in measurement.PRICED_HEADS.items()}
    )
    profile = profile_model(tiny_gpt2(), token_batch())
    assert profile.with_head("plain").head_ms == pytest.approx(4.0)
    assert profile.with_head("chunked").head_ms == pytest.approx(5.0)
    assert [next(times, None) for times in runs.values()] == [None, None]
