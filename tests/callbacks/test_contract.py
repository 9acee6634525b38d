"""The contract of every callback of the package. A new callback gets a row in CALLBACKS."""

import re

import pytest
from transformers import TrainerCallback

import adacc_hf.callbacks
from adacc_hf import AdaccConfig

CALLBACKS = {
    "AdaccCallback": {"memory_budget": 0.6, "actions": ("retain", "recompute")},
    "ThroughputCallback": {"warmup_steps": 1},
}
"""Keyword arguments with which each callback has work to do in 5 steps of the tiny model."""

CUDA_ONLY = {"throughput/peak_allocated_bytes", "adacc/host_gib", "adacc/measured_host_gib"}
"""Keys that need a CUDA device: its allocator, or host memory to which a policy moves payloads."""


@pytest.fixture(params=sorted(CALLBACKS))
def callback(request):
    return getattr(adacc_hf.callbacks, request.param)(**CALLBACKS[request.param])


def documented_keys(callback) -> set[str]:
    """Return the keys in the table of the class's docstring."""
    return set(re.findall(r"^ *\| `(\w+/\w+)` \|", type(callback).__doc__, flags=re.MULTILINE))


def test_every_exported_callback_is_held_to_the_contract():
    exported = [
        name for name in adacc_hf.callbacks.__all__ if issubclass(getattr(adacc_hf.callbacks, name), TrainerCallback)
    ]
    assert sorted(CALLBACKS) == sorted(exported)


def test_constructs_without_arguments(callback):
    assert isinstance(type(callback)(), type(callback))


def test_can_be_given_as_a_class(train, callback):
    run = train([type(callback)], max_steps=1)
    assert any(isinstance(other, type(callback)) for other in run.trainer.callback_handler.callbacks)


def test_trains_twice_with_one_instance(train, callback):
    first, second = train([callback]), train([callback])
    second.assert_equals(first)
    assert documented_keys(callback) - CUDA_ONLY <= second.logs[-2].keys()


def test_detach_is_idempotent(make_trainer, traces, callback):
    callback.detach()
    trainer = make_trainer([callback])
    trainer.train()
    traces_before = traces(trainer)
    callback.detach()
    callback.detach()
    assert traces(trainer) == traces_before


@pytest.mark.parametrize("at_step", [1, 4])  # AdaccCallback sets its first policy at the end of step 2
def test_training_goes_on_after_a_detach(train, callback, at_step):
    from transformers import TrainerCallback

    class Detach(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at_step:
                callback.detach()

    train([callback, Detach()]).assert_equals(train())


def test_training_goes_on_after_a_detach_within_the_loss(train, callback):
    from transformers import Trainer

    class Detach(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step == 3:
                callback.detach()
            return super().compute_loss(model, inputs, *args, **kwargs)

    train([callback], trainer_class=Detach).assert_equals(train())


def test_repr_rebuilds_the_callback(callback):
    callback_from_repr = eval(repr(callback), vars(adacc_hf.callbacks) | {"AdaccConfig": AdaccConfig})
    assert repr(callback_from_repr) == repr(callback)
    assert "at 0x" not in repr(callback)


def test_documented_keys_are_logged_and_no_others(train, callback):
    plain = {key for log in train().logs for key in log}
    logged = {key for log in train([callback]).logs for key in log}
    assert documented_keys(callback) - CUDA_ONLY == {key for key in logged - plain if key not in CUDA_ONLY}


def test_logged_keys_reach_tensorboard(train, callback, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    train([callback], report_to="tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert {f"train/{key}" for key in documented_keys(callback) - CUDA_ONLY} <= set(events.Tags()["scalars"])


def test_evaluation_results_are_left_alone(make_trainer, callback):
    trainer = make_trainer([callback], eval_strategy="steps", eval_steps=4)
    trainer.train()
    keys = trainer.evaluate().keys() | {key for log in trainer.state.log_history if "eval_loss" in log for key in log}
    assert not keys & documented_keys(callback)
