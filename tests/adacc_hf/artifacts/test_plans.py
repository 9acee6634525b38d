"""Plans of one block without a solver."""

import random
from dataclasses import replace

from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan, random_plan, recompute_plan, uniform_plan
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, BlockAction, Choice

ALL = tuple(Action)


def choices_of(kind, plan):
    return {kind.values[value].name: choice for value, choice in plan.choices}


def test_a_checkpoint_retains_inputs_alone(kind):
    plan = checkpoint_plan(kind)
    assert plan.is_checkpointed
    assert choices_of(kind, plan) == {"input": RETAIN, "a": RECOMPUTE, "b": RECOMPUTE, "c": RECOMPUTE}
    assert plan.places == ()


def test_a_checkpoint_compresses_inputs_and_knows_their_places(kind):
    int4 = Choice.compress(b_codec(kind))
    plan = checkpoint_plan(kind, {0: int4})
    assert choices_of(kind, plan)["input"] == int4
    assert plan.places == ((0, kind.values[0].place),)


def b_codec(kind):
    """Return the only codec option of `kind`, which its value b has."""
    (option,) = [option for value in kind.values for option in value.codecs]
    return option


def test_a_kind_that_allows_no_checkpoint_has_none(kind):
    assert checkpoint_plan(replace(kind, block_actions=(BlockAction.PLAIN,))) is None


def test_one_action_goes_to_all_activations_that_allow_it(kind):
    assert choices_of(kind, recompute_plan(kind)) == {"input": RETAIN, "a": RECOMPUTE, "b": RECOMPUTE, "c": RECOMPUTE}
    compressed = choices_of(kind, uniform_plan(kind, Action.COMPRESS, None))
    assert {name: choice.codec for name, choice in compressed.items()} == dict.fromkeys("ac", None) | {
        "input": None,
        "b": "int4",
    }
    assert uniform_plan(kind, Action.COMPRESS, "int8") == plain_plan(kind)
    assert uniform_plan(kind, Action.RETAIN, None) == plain_plan(kind)


def test_a_block_without_replay_is_checkpointed_where_it_should_recompute(kind):
    untrusted = replace(kind, untrusted="it reads data")
    assert uniform_plan(untrusted, Action.RECOMPUTE, None).is_checkpointed
    assert uniform_plan(untrusted, Action.RETAIN, None) == plain_plan(untrusted)
    must_run_again = replace(kind, block_actions=(BlockAction.CHECKPOINT,))
    assert all(uniform_plan(must_run_again, action, None).is_checkpointed for action in ALL)


def test_random_plans_use_the_allowed_actions_and_the_generator_alone(kind):
    def plans(actions, lossless=False):
        return [random_plan(kind, random.Random(seed), actions, lossless, 0.0) for seed in range(30)]

    assert plans(ALL) == plans(ALL)
    choices = [each for plan in plans(ALL) for each in plan.choices]
    assert {choice.action for _, choice in choices} == set(ALL)
    assert all(kind.values[value].recomputable for value, choice in choices if choice == RECOMPUTE)
    assert {c.action for plan in plans([Action.RETAIN, Action.RECOMPUTE]) for _, c in plan.choices} == {
        Action.RETAIN,
        Action.RECOMPUTE,
    }
    assert not any(c.action is Action.COMPRESS for plan in plans(ALL, lossless=True) for _, c in plan.choices)
