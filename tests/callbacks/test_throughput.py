"""ThroughputCallback: the tokens, times and steps that are counted or left out."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from adacc_hf.callbacks import ThroughputCallback, throughput


class Slow(TrainerCallback):
    """Callback that sleeps before the end of each of the first `num_steps` steps."""

    def __init__(self, num_steps: int, seconds: float) -> None:
        self.num_steps, self.seconds = num_steps, seconds

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < self.num_steps:
            time.sleep(self.seconds)


def logged(run, key):
    return [log[key] for log in run.logs if key in log]


def test_step_time_is_per_step_and_tokens_are_of_all_micro_batches(train):
    run = train([ThroughputCallback(warmup_steps=1), Slow(99, 0.05)], gradient_accumulation_steps=2)
    step_ms = logged(run, "throughput/step_ms")
    assert min(step_ms) >= 50.0
    # Every step has 2 micro-batches of 4 sequences of 32 tokens.
    for tokens_per_second, ms in zip(logged(run, "throughput/tokens_per_second"), step_ms, strict=True):
        assert tokens_per_second * ms / 1e3 == pytest.approx(2 * 4 * 32)


@pytest.mark.parametrize("warmup_steps", [0, 2, 4])
def test_warm_up_steps_are_left_out(train, warmup_steps):
    run = train([ThroughputCallback(warmup_steps=warmup_steps), Slow(warmup_steps, 0.5)])
    assert len(logged(run, "throughput/step_ms")) == 5 - warmup_steps
    assert max(logged(run, "throughput/step_ms")) < 500.0


def test_evaluation_counts_neither_as_tokens_nor_as_time(train):
    run = train([ThroughputCallback(warmup_steps=0)], eval_strategy="steps", eval_steps=1)
    tokens = [
        rate * ms / 1e3
        for rate, ms in zip(logged(run, "throughput/tokens_per_second"), logged(run, "throughput/step_ms"), strict=True)
    ]
    assert tokens == pytest.approx([4 * 32] * 5)


def test_a_log_covers_the_steps_since_the_last(train):
    run = train([ThroughputCallback(warmup_steps=0), Slow(2, 0.3)], logging_steps=2, max_steps=4)
    first, second = logged(run, "throughput/step_ms")
    assert first >= 300.0 > second


def test_the_last_step_of_the_warm_up_is_waited_for(monkeypatch):
    """The first counted step would otherwise include the GPU's unfinished work of the warm-up."""
    num_steps_at_sync, num_steps, seconds = [], 0, itertools.count()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: num_steps_at_sync.append(num_steps))
    callback = ThroughputCallback(warmup_steps=2)
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))  # a step takes one second
    for num_steps in range(1, 5):  # noqa: B007
        callback.on_step_begin(None, None, None)
        callback.on_step_end(None, None, None)
    assert num_steps_at_sync == [2, 3, 4]
    logs, state = {"loss": 1.0}, TrainerState()
    monkeypatch.setattr(throughput, "take_peak", lambda: 0)
    callback.on_log(None, state, None, logs)
    assert logs["throughput/step_ms"] == 1e3
    assert next(seconds) == 4 + 2, "the beginnings of four steps and the ends of two"
