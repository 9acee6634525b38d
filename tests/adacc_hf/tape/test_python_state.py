"""The numbers, names and flags that blocks hold, changed in the middle of training (rules R1 and R8)."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model
from adacc_hf.tape import call_key as python_state
from adacc_hf.tape.call_key import INERT_AFTER, RESTLESS_AFTER, SHORT_TEXT, PythonState

CONFIG = AdaccConfig(min_compress_bytes=0)
PLACES = ("attribute", "element", "configuration", "dropout", "mode")


def forward(block, hidden):
    scale = block.scale * block.scales["first"] * block.config.scale
    block.num_calls += block.counts
    inner = (block.up(hidden) * scale).tanh().exp()
    return hidden + block.dropout(block.down(inner))


def setup(config, counts=False):
    def give(block):
        block.scale, block.scales, block.num_calls = 1.0, {"first": 1.0}, 0
        block.config, block.counts = config, counts
        block.dropout = nn.Dropout(0.1)

    return give


@pytest.fixture
def toy(toy_model):
    return toy_model(forward, setup=setup(PretrainedConfig(scale=1.0)))


def put(model, place, value):
    """Change one number of the second block, or of both: they share a configuration."""
    block = model.layers[1]
    if place == "attribute":
        block.scale = value
    elif place == "element":
        block.scales["first"] = value
    elif place == "configuration":
        block.config.scale = value
    elif place == "dropout":
        block.dropout.p = value / 10
    else:
        block.dropout.train(value > 2)


def train(model, batch, changes):
    """Per step what `run_steps` notes; step i begins with `changes[i]`."""
    results = []
    for seed, change in enumerate(changes):
        if change is not None:
            put(model, *change)
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        results.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    return results


def start(model):
    for place in PLACES:
        put(model, place, 3.0 if place == "mode" else 1.0)


some_changes = st.lists(
    st.none() | st.tuples(st.sampled_from(PLACES), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=2, max_size=8
)


@settings(max_examples=15, deadline=None)
@given(changes=some_changes, actions=st.sampled_from([("recompute",), ("retain", "recompute")]), seed=st.integers(0, 9))
def test_changed_numbers_are_never_replayed_with_the_old_ones(
    toy_model, toy_batch, assert_same_steps, changes, actions, seed
):
    model, batch = toy_model(forward, setup=setup(PretrainedConfig(scale=1.0))), toy_batch()
    changes = [None, None, None, *changes]  # the second call of a shape is recorded again in any case
    plain = train(model, batch, changes)
    start(model)
    policy = Policy.random(profile_model(model, batch, CONFIG), seed=seed, actions=actions)
    with apply_policy(model, policy) as handle:
        assert_same_steps(train(model, batch, changes), plain)
        start(model)
        handle.replace(policy)  # what is known of the states goes on to another policy
        assert_same_steps(train(model, batch, changes), plain)


def test_a_state_is_recorded_once_for_all_policies(toy, toy_batch, recorded):
    batch = toy_batch()
    policy = Policy.uniform(profile_model(toy, batch, CONFIG), "recompute")
    there_and_back = [None, None, ("attribute", 2.0), None, ("attribute", 1.0), None, ("attribute", 2.0)]
    recorded.clear()
    with apply_policy(toy, policy) as handle:
        train(toy, batch, there_and_back)
        first = recorded.count("layers.1")
        handle.replace(policy)
        train(toy, batch, there_and_back)
    # Two recordings of each state, as of each shape.
    assert first == 2 * 2
    assert recorded.count("layers.1") == first


def test_a_count_of_calls_is_looked_at_no_more(toy_model, toy_batch, recorded):
    toy, batch = toy_model(forward, setup=setup(PretrainedConfig(scale=1.0), counts=True)), toy_batch()
    policy = Policy.uniform(profile_model(toy, batch, CONFIG), "recompute")
    recorded.clear()
    with apply_policy(toy, policy):
        train(toy, batch, [None] * 20)
    assert recorded.count("layers.0") == 2 + INERT_AFTER


def test_numbers_that_move_at_every_step_leave_the_block_to_torchs_checkpoint(
    toy, toy_batch, recorded, assert_same_steps, caplog
):
    batch = toy_batch()
    changes = [("attribute", 1.0 + step / 8) for step in range(20)]
    plain = train(toy, batch, changes)
    start(toy)
    policy = Policy.uniform(profile_model(toy, batch, CONFIG), "recompute")
    recorded.clear()
    with apply_policy(toy, policy), caplog.at_level(logging.WARNING):
        assert_same_steps(train(toy, batch, changes), plain)
    assert "layers.1 and others like it are run under torch's checkpoint: scale" in caplog.text
    assert "changes again and again" in caplog.text
    assert recorded.count("layers.1") == 1 + RESTLESS_AFTER
    assert recorded.count("layers.0") == 2  # whose scale stands still


# The states themselves


@pytest.fixture
def block():
    block = nn.Sequential(nn.Dropout(0.1), nn.LayerNorm(4))
    block.config, block.names, block.note = PretrainedConfig(rate=0.5), ["a"], object()
    return block


def test_states_are_known_again(block):
    state = PythonState(block)
    assert state.number() == 0
    block[0].p = 0.2
    assert state.number() == 1
    assert state.changed == ("0.p",)
    block.names.append("b")
    assert state.number() == 2
    block.config.rate = 0.1
    assert state.number() == 3
    assert state.changed == ("config.rate",)
    block[0].p, block.names, block.config.rate = 0.1, ["a"], 0.5
    assert state.number() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block[0], "p", float("0.1")),
        lambda block: setattr(block, "note", object()),
        lambda block: setattr(block, "cached", torch.zeros(3)),
        lambda block: setattr(block, "names", ["a"]),
        lambda block: block.eval() and block.train(),
    ],
    ids=["equal-number", "object", "tensor", "equal-list", "there-and-back"],
)
def test_what_is_the_same_or_no_plain_value_makes_no_state(block, change):
    state = PythonState(block)
    change(block)
    assert state.number() == 0


@pytest.mark.parametrize(
    "left", [lambda block: delattr(block[1], "eps"), lambda block: setattr(block[1], "eps", torch.ones(2))]
)
def test_a_number_that_is_no_more_makes_a_state(block, left):
    state = PythonState(block)
    left(block)
    assert state.number() == 1
    assert state.changed == ("1.eps",)


def test_true_is_another_state_than_one(block):
    block.flag = 1
    state = PythonState(block)
    block.flag = True
    assert state.number() == 1


def test_long_states_make_no_block_unstable(block):
    state = PythonState(block)
    for step in range(1, 3 * RESTLESS_AFTER):
        block[0].p = 1 / step
        numbers = {state.number() for _ in range(SHORT_TEXT)}
        state.learn(same_operators=False)
        assert len(numbers) == 1
    assert not state.is_unstable


def test_a_value_with_an_effect_now_and_then_is_still_looked_at(block):
    state = PythonState(block)
    for step in range(2 * INERT_AFTER):
        block[0].p = 1 / (step + 2)
        assert state.number() == step + 1
        state.learn(same_operators=step > 0)


def test_states_of_long_ago_are_forgotten(block, monkeypatch):
    """Such as those of a rate that moves every few hundred steps; no tape is kept for them either."""
    monkeypatch.setattr(python_state, "MAX_STATES", 4)
    state, numbers = PythonState(block), []
    for number in [*range(2, 10), 9, 8, 2]:
        block[0].p = 1 / number
        numbers.append(state.number())
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 9]
    assert len(state._numbers) == 4
    assert all(len(key) < 64 for key in state._numbers)
