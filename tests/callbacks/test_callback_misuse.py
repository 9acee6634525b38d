"""Frequent mistakes of users: each one works or raises an error that says what to do."""

from __future__ import annotations

import pytest
from accelerate import Accelerator, ParallelismConfig
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.torch_glue.compat import CHECKPOINTING


class TrainInTheMidst(TrainerCallback):
    """Callback that trains with another Trainer in a step of the first one."""

    def __init__(self, inner_trainer):
        self.inner_trainer = inner_trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.inner_trainer.train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 0.5}, r"config=0\.5 is no AdaccConfig: give settings by name"),
        ({"config": {"memory_budget": 0.5}}, "config={'memory_budget': 0.5} is no AdaccConfig"),
        ({"config": AdaccConfig}, "config=<class .*> is no AdaccConfig"),
        ({"memory_buget": 0.5}, r"memory_buget=0\.5 is not a setting of AdaccConfig: choose memory_budget"),
        ({"policy": 5}, "policy=5 has type int: give a Policy, the path of a file"),
        ({"policy": {"plans": []}}, "has type dict: give a Policy"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        AdaccCallback(**arguments)


def test_a_function_that_makes_no_policy_is_named(train):
    with pytest.raises(ValueError, match=r"policy=\.\.\. is a function that returned None: let it return a Policy"):
        train([AdaccCallback(policy=lambda profile: None)])


def test_a_folder_given_as_a_policy_is_named(train, tmp_path):
    with pytest.raises(IsADirectoryError, match=r"policy file .* is a folder: name the policy file in it"):
        train([AdaccCallback(policy=tmp_path)])


def test_two_callbacks_in_one_trainer_are_refused(make_trainer, lossless, traces):
    trainer = make_trainer([AdaccCallback(**lossless), AdaccCallback(**lossless)])

    def on_blocks():
        return {
            name: attributes
            for name, attributes in traces(trainer)["modules"].items()
            if name.startswith("transformer.h")
        }

    hooks_before = on_blocks()
    with pytest.raises(ValueError, match=r"2 callbacks of class AdaccCallback.*leave one of them"):
        trainer.train()
    assert on_blocks() == hooks_before


def test_one_callback_given_twice_trains_as_if_given_once(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback, callback]).assert_equals(train([AdaccCallback(**lossless)]))
    assert [event["event"] for event in callback.history].count("policy") == 1


def test_one_callback_in_two_runs_at_once_is_refused(make_trainer, lossless):
    callback = AdaccCallback(**lossless)
    inner = make_trainer([callback], max_steps=3)
    with pytest.raises(RuntimeError, match="in use by another Trainer's run"):
        make_trainer([callback, TrainInTheMidst(inner)], max_steps=6).train()
    inner.train()
    assert callback.policy is not None, "after the first run the callback may start another one"


def test_evaluation_in_mid_run_changes_nothing(train, lossless):
    often = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 6}
    callback = AdaccCallback(**lossless, tracking=1)
    train([callback], **often).assert_equals(train(**often))
    assert callback.policy is not None


def test_a_resumed_run_with_other_batches_gets_a_policy_for_them(train, lossless, tmp_path):
    train([AdaccCallback(**lossless)], max_steps=3, save_strategy="steps", save_steps=3)
    callback = AdaccCallback(**lossless)
    train([callback], resume=str(tmp_path / "run" / "checkpoint-3"), max_steps=22, per_device_train_batch_size=8)
    reasons = [event.get("reason") for event in callback.history if event["event"] == "policy"]
    assert reasons == [None, None, "for batches of input_ids 8x32, labels 8x32"]


class ShareSequences(TrainerCallback):
    """Callback that presents the Trainer, once its model is prepared, as sharing each sequence among ranks."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_train_begin(self, args, state, control, **kwargs):
        self.monkeypatch.setattr(Accelerator, "parallelism_config", ParallelismConfig(cp_size=2))


def test_ranks_that_share_a_sequence_are_refused(train, lossless, monkeypatch):
    with pytest.raises(ValueError, match=r"cp_size=2: in ring attention each rank runs .*; set cp_size=1"):
        train([ShareSequences(monkeypatch), AdaccCallback(**lossless)])


@pytest.mark.parametrize("is_on", [True, False])
def test_a_policy_in_place_of_checkpointing_is_said_once(train, lossless, caplog, is_on):
    """TRL's arguments switch checkpointing on by default. The log line uses the setting's name in Transformers."""
    train([AdaccCallback(**lossless)], **{CHECKPOINTING: is_on})
    log_lines = [record.getMessage() for record in caplog.records if f" {CHECKPOINTING}=True" in record.getMessage()]
    assert len(log_lines) == is_on
    assert all("a policy replaces checkpointing" in text and "memory_budget=0.6" in text for text in log_lines)
    assert all(f"{CHECKPOINTING}=False to avoid this warning" in text for text in log_lines)
