"""Frequent mistakes of users: each one works or raises an error that says what to do."""

from __future__ import annotations

import pytest

from adacc_hf import AdaccCallback, AdaccConfig


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


def test_one_callback_given_twice_trains_as_if_given_once(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback, callback]).assert_equals(train([AdaccCallback(**lossless)]))
    assert [event["event"] for event in callback.history].count("policy") == 1


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
