"""Choices of the integer program, and their prices, which it computes without the simulator."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Choice
from adacc_hf.solve.milp import build_block_model, price
from adacc_hf.solve.simple_policies import random_policy


@settings(deadline=None)
@given(data=st.data())
def test_prices_agree_with_the_simulator(profiles, data):
    profile = data.draw(profiles())
    kind = profile.kinds[0]
    model = build_block_model(kind, AdaccConfig())
    generator = random.Random(data.draw(st.integers(0, 1 << 30)))
    choices = {}
    for value in kind.activations:
        menu = [store.choice for store in model.menus[value.index]]
        choices[value.index] = generator.choice(menu + [RECOMPUTE] * (model.recompute(value.index) is not None))
    column = price(model, choices)
    outcome = run_block(kind, column.plan)
    assert (column.nbytes, column.shared) == (outcome.stored_bytes, outcome.shared)
    # Multiples of 1/8 add up exactly.
    assert column.ms == outcome.overhead_ms


@pytest.mark.parametrize("seed", range(5))
def test_prices_agree_on_gpt2(gpt2_like_profile, seed):
    profile = gpt2_like_profile(num_blocks=1, attention="eager")
    plan = random_policy(profile, seed, ("retain", "compress", "recompute"), whole_blocks=True).plans[0]
    model = build_block_model(profile.kinds[0], AdaccConfig())
    block_columns = [column for column in model.checkpoints if column.plan == plan]
    assert bool(block_columns) == plan.is_checkpointed
    column = block_columns[0] if block_columns else price(model, dict(plan.choices))
    outcome = run_block(profile.kinds[0], plan)
    assert column.nbytes == outcome.stored_bytes
    # Sums of about 30 terms in another order.
    assert column.ms == pytest.approx(outcome.overhead_ms, rel=1e-12)


def test_what_stands_on_randomness_that_is_not_stored_is_never_replayed(tape_builder):
    tape = tape_builder()
    start = tape.value("input", 8)
    (noise,) = tape.operator("rand", [start], [("noise", 8)], ms=1.0, replayable=False)
    (a,) = tape.operator("f", [noise], [("a", 8)], ms=1.0, save=[-1])
    tape.operator("g", [a], [("b", 8)], ms=1.0, save=[-1])
    model = build_block_model(tape.kind(), AdaccConfig())
    # f reads the noise, which is never stored; g reads a, which can be stored.
    assert model.runnable == {2}
    assert model.recompute(a) is None


def test_without_recompute_nothing_is_replayed(gpt2_like_profile):
    kind = gpt2_like_profile().kinds[0]
    assert build_block_model(kind, AdaccConfig(actions=("retain", "compress"))).runnable == frozenset()


def test_codecs_that_save_nothing_are_no_choice(tape_builder, make_codec):
    tape = tape_builder()
    start = tape.value("input", 8)
    (a,) = tape.operator("f", [start], [("a", 8)], ms=1.0, save=[-1])
    tape.values[a]["codecs"] = (make_codec("int8", 8, 0.0, 0.0), make_codec("int4", 5, 0.1, 0.1))
    model = build_block_model(tape.kind(), AdaccConfig())
    assert [store.choice for store in model.menus[a]] == [RETAIN, Choice.compress(tape.values[a]["codecs"][1])]
