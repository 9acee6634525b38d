"""Frequent mistakes of users: each one works or raises an error that says what to do."""

import pytest

from adacc_hf import AdaccCallback, AdaccConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 0.5}, r"config=0\.5 is not an AdaccConfig: give settings by name"),
        ({"config": {"memory_budget": 0.5}}, "config={'memory_budget': 0.5} is not an AdaccConfig"),
        ({"config": AdaccConfig}, "config=<class .*> is not an AdaccConfig"),
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


def test_the_folder_of_a_run_is_taken_as_its_policy(train, lossless, tmp_path):
    """As `adacc explain` takes it."""
    first = AdaccCallback(**lossless)
    train([first])
    second = AdaccCallback(policy=tmp_path / "run")
    train([second])
    assert second.policy == first.policy


def test_a_folder_without_a_policy_is_named(train, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no policy file, adacc_policy\.json: pass the folder of a run"):
        train([AdaccCallback(policy=tmp_path)])


def test_the_class_in_place_of_a_callback_trains_with_the_defaults_and_says_so(train, caplog):
    """The Trainer makes a callback of each class, as for its own callbacks."""
    train([AdaccCallback])
    assert any(
        text.startswith("Adacc: memory_budget='auto': the first step is profiled while it trains")
        for text in caplog.messages
    )


def test_one_callback_given_twice_trains_as_if_given_once(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback, callback]).assert_equals(train([AdaccCallback(**lossless)]))
    assert [event["event"] for event in callback.history].count("policy") == 1
