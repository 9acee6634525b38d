"""ThroughputCallback: the tokens, times and steps that are counted or left out."""

from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from adacc_hf.callbacks import ThroughputCallback, throughput


class Clock(TrainerCallback):
    """Clock of a run: a step takes 0.1 s, each of the first `num_slow` steps 0.5 s, a batch of evaluation 9 s."""

    seconds, num_slow = 0.0, 0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seconds += 0.5 if state.global_step < self.num_slow else 0.1

    def on_prediction_step(self, args, state, control, **kwargs):
        self.seconds += 9.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    return clock


def logged(run, key):
    return [log[key] for log in run.logs if key in log]


def test_step_time_is_per_step_and_tokens_are_of_all_micro_batches(train, clock):
    run = train([ThroughputCallback(warmup_steps=1), clock], gradient_accumulation_steps=2)
    assert logged(run, "throughput/step_ms") == pytest.approx([100.0] * 4)
    # Every step has 2 micro-batches of 4 sequences of 32 tokens.
    assert logged(run, "throughput/tokens_per_second") == pytest.approx([2 * 4 * 32 / 0.1] * 4)


@pytest.mark.parametrize("warmup_steps", [0, 2, 4])
def test_warm_up_steps_are_left_out(train, clock, warmup_steps):
    clock.num_slow = warmup_steps
    run = train([ThroughputCallback(warmup_steps=warmup_steps), clock])
    assert logged(run, "throughput/step_ms") == pytest.approx([100.0] * (5 - warmup_steps))


def test_evaluation_counts_neither_as_tokens_nor_as_time(train, clock):
    run = train([ThroughputCallback(warmup_steps=0), clock], eval_strategy="steps", eval_steps=1)
    assert clock.seconds > 5 * 9.0
    assert logged(run, "throughput/step_ms") == pytest.approx([100.0] * 5)
    assert logged(run, "throughput/tokens_per_second") == pytest.approx([4 * 32 / 0.1] * 5)


def test_a_log_covers_the_steps_since_the_last(train, clock):
    clock.num_slow = 2
    run = train([ThroughputCallback(warmup_steps=0), clock], logging_steps=2, max_steps=4)
    assert logged(run, "throughput/step_ms") == pytest.approx([500.0, 100.0])
