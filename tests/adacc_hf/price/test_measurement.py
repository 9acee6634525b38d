"""Measurements of real runs."""

import pytest
import torch

from adacc_hf.price import head_memory, measurement, profiler, timing
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profiler import profile_model
from adacc_hf.torch_glue.memory import forward_loss


@pytest.fixture(autouse=True, scope="module")
def counted_times():
    """Keep measured times."""


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    """A step is timed between two device synchronizations: earlier work is excluded, its own included."""
    events = []
    monkeypatch.setattr(timing, "wait_for", lambda device: events.append(f"wait for {device}"))
    times = [timing.seconds_of(lambda: events.append("step"), torch.device("cpu"), iter([1.0, 3.5]).__next__)]
    assert times == [2.5]
    assert events == ["wait for cpu", "step", "wait for cpu"]


def test_the_recorded_step_is_timed_without_the_measurements_in_it(monkeypatch, toy_model, toy_batch):
    clock = [1.0]

    def advance(seconds):
        clock[0] += seconds

    monkeypatch.setattr(measurement, "seconds_at", lambda device: clock[0])
    errors = Measurement.gradient_errors
    monkeypatch.setattr(Measurement, "gradient_errors", lambda *args: advance(5.0) or errors(*args))
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    monkeypatch.setattr(profiler, "forward_loss", lambda *args: advance(2.0) or forward_loss(*args))
    profile = profile_model(model, toy_batch())
    assert clock[0] > 7.0
    blocks_ms = sum(profile.kind_of(block).forward_ms for block in profile.blocks)
    assert profile.step_ms == pytest.approx(2000.0 + blocks_ms)


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
    heads = {name: priced(name, head) for name, head in measurement.PRICED_HEADS.items()}
    monkeypatch.setattr(head_memory, "PRICED_HEADS", heads)
    profile = profile_model(tiny_gpt2(), token_batch())
    ratio = 4  # a quarter of the rows is timed
    assert profile.with_head("plain").head_ms == pytest.approx(4.0 * ratio)
    assert profile.with_head("chunked").head_ms == pytest.approx(5.0 * ratio)
    assert [next(times, None) for times in runs.values()] == [None, None]
