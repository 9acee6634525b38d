"""Exceptions: the types that users catch, and those that ranks and processes send to each other."""

import inspect
import pickle

import pytest

from adacc_hf.artifacts import errors
from adacc_hf.artifacts.errors import AdaccError, InfeasibleBudgetError, as_sentence
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("no room", "no room."), ("no room. ", "no room."), ("why?", "why?"), ("", "."), (KeyError("x"), "'x'.")],
)
def test_a_sentence_can_be_appended(text, sentence):
    assert as_sentence(text) == sentence


def test_an_infeasible_budget_arrives_whole_in_another_process(gpt2_like_profile):
    policy = uniform_policy(gpt2_like_profile(num_blocks=1), "recompute")
    error = InfeasibleBudgetError("too little", 100, 90, policy)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is InfeasibleBudgetError
    assert (str(copy), copy.smallest_budget_bytes, copy.bound_bytes, copy.least) == ("too little", 100, 90, policy)


def test_one_type_catches_all_errors_that_reach_a_user():
    raised = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value is not AdaccError
    }
    assert {error for error in raised if not issubclass(error, AdaccError)} == set()
    # Code that catches Python's types keeps working: wrong settings are ValueErrors, wrong states RuntimeErrors.
    neither = {error.__name__ for error in raised if not issubclass(error, (ValueError, RuntimeError))}
    assert neither == {"RankFailedError"}
