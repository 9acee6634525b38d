"""RunProfiler: which micro-batch is recorded, and when recording waits. Optimizers that step within a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.adapt.run_profiler import RunProfiler, TrainingLoop
from adacc_hf.solve.solver import least_policy


@pytest.mark.parametrize(("num_micro", "turn"), [(1, 1), (2, 2), (4, 2)])
def test_the_first_micro_batch_that_finds_gradients_is_recorded(make_model, num_micro, turn):
    profiler = RunProfiler(AdaccConfig(), TrainingLoop(num_micro))
    model = make_model()
    assert [number for number in range(1, num_micro + 1) if profiler.is_turn(number, model)] == [turn]


def test_recording_waits_for_another_profiler_and_warns_once(make_model, caplog):
    profiler, model = RunProfiler(AdaccConfig(), TrainingLoop()), make_model()
    assert not profiler.must_wait(model)
    with profile(activities=[ProfilerActivity.CPU]):
        assert [profiler.must_wait(model) for _ in range(2)] == [True, True]
    assert not profiler.must_wait(model)
    assert caplog.text.count("a torch profiler is active") == 1


@pytest.mark.parametrize(("device", "num_batches"), [("cpu", 1), ("cuda", 0)])
def test_a_cpu_has_one_batch_before_a_step_and_none_ahead(device, num_batches):
    loop = TrainingLoop()
    assert loop.num_before_step(torch.device(device)) == num_batches
    assert loop.num_prefetched(torch.device(device)) == 0


LOSSLESS = {"actions": ("retain", "recompute"), "head": "plain"}


class SteppingTrainer(Trainer):
    """Trainer that fills gradient buckets in backward and steps its own optimizer after backward, like DeepSpeed."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        buckets: list[torch.Tensor] = []

        def fill(parameter: torch.Tensor) -> None:
            buckets.append(parameter.grad.clone())

        hooks = [parameter.register_post_accumulate_grad_hook(fill) for parameter in model.parameters()]
        loss = super().training_step(model, *args, **kwargs)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        for hook in hooks:
            hook.remove()
        return loss


@pytest.fixture
def train_stepping(train, make_model):
    """Return `train_stepping(callbacks)`, which trains and returns a Run of `SteppingTrainer`."""

    def run(callbacks):
        model = make_model(n_layer=4, vocab_size=600)
        settings = {"trainer_class": SteppingTrainer, "max_steps": 10, "per_device_train_batch_size": 8}
        return train(callbacks, model=model, **settings)

    return run


@pytest.mark.gate
def test_the_first_policy_takes_little_memory_until_a_step_was_counted(train_stepping, monkeypatch):
    monkeypatch.setattr("adacc_hf.adapt.policy_choice.SOLVER_MS", 0.0)  # a solver run always pays
    plain = train_stepping([])
    roomy = AdaccCallback(memory_budget="1GiB", **LOSSLESS)
    train_stepping([roomy])
    least = least_policy(roomy.profile, AdaccConfig(**LOSSLESS)).predicted_peak_bytes
    # The first policy leaves a fifth of the budget free.
    callback = AdaccCallback(memory_budget=6 * least // 5, **LOSSLESS)
    adacc_run = train_stepping([callback])
    first, _, second, _ = history = callback.history
    assert [(e["step"], e["event"]) for e in history] == [(1, "policy"), (2, "memory"), (4, "policy"), (5, "memory")]
    assert first["peak_bytes"] == least
    assert first["stored_bytes"] < second["stored_bytes"]
    assert second["reason"] == "for batches of input_ids 8x32, labels 8x32, which have come 2 times"
    assert least < second["peak_bytes"] <= callback.config.memory_budget
    peaks = [event["measured_peak_bytes"] for event in callback.history if "measured_peak_bytes" in event]
    assert peaks[0] == least, "the buckets are in the profile"
    assert max(peaks) <= callback.config.memory_budget
    adacc_run.assert_equals(plain)


def update(parameter: torch.Tensor) -> None:
    """Take a step with the gradient of `parameter`, and free the gradient."""
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-2)
    parameter.grad = None


def layer_by_layer(model: Any) -> None:
    """Update each weight as soon as its gradient is complete, like GaLore and APOLLO."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def one_gradient_later(model: Any) -> None:
    """Update weights when the next gradient is about to be complete, like LOMO."""

    def update_earlier(_: torch.Tensor) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                update(parameter)

    for parameter in model.parameters():
        parameter.register_hook(update_earlier)


@pytest.mark.parametrize("add_hooks", [layer_by_layer, one_gradient_later])
@pytest.mark.parametrize("budget", [0.6, 0.25])
def test_weights_that_move_inside_backward(train, make_model, add_hooks, budget):
    """Replay reads a weight before its gradient exists, and profiling changes no weight."""

    def run(callbacks):
        model = make_model()
        add_hooks(model)
        return train(callbacks, model=model, max_steps=6)

    callback = AdaccCallback(memory_budget=budget, **LOSSLESS)
    run([callback]).assert_equals(run([]))
    assert callback.policy.action_counts()["recompute"] > 0
