"""The memory and time of one block under torch's checkpoint, calculated by hand."""

from dataclasses import replace

import pytest

from adacc_hf.artifacts.block_outcome import rerun_ms, run_block
from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import Choice


def test_a_checkpoint_stores_the_input_and_runs_the_forward_again(kind):
    outcome = run_block(replace(kind, generator_bytes=16), checkpoint_plan(kind))
    assert outcome.stored_bytes == outcome.live_bytes == 100 + 16
    assert outcome.overhead_ms == 1.0 + 2.0 + 4.0
    # The second forward computes all saved values (10 + 20 + 40) next to what is stored, which stays until the end.
    assert outcome.moments[0] >= 116 + 70
    assert outcome.moments[-1] == min(outcome.moments) == 116


def test_an_input_may_stay_encoded_and_is_decoded_for_the_second_forward(kind, make_codec):
    option = make_codec("int8", 25, 0.25, 0.5)
    start = replace(kind.values[0], codecs=(option,))
    kind = replace(kind, values=(start, *kind.values[1:]))
    retained = run_block(kind, checkpoint_plan(kind))
    encoded = run_block(kind, checkpoint_plan(kind, {0: Choice.compress(option)}))
    assert (retained.stored_bytes, encoded.stored_bytes) == (100, 25)
    assert encoded.overhead_ms == retained.overhead_ms + 0.25 + 0.5
    assert max(encoded.moments) == max(retained.moments) + 25, "the payload stays next to the decoded input"
    assert encoded.forward_moments[-1] == encoded.forward_moments[-2] + 25


def test_the_second_forward_ends_with_the_last_saved_value(tape_builder):
    tape = tape_builder()
    start = tape.value("input", 100)
    (a,) = tape.operator("f", [start], [("a", 10)], ms=1.0, save=[-1])
    (b,) = tape.operator("g", [a], [("b", 10)], ms=2.0, save=[a])
    tape.operator("h", [b], [("c", 10)], ms=4.0)
    assert rerun_ms(tape.kind()) == 1.0
    assert rerun_ms(replace(tape.kind(), untrusted="it reads data", forward_ms=9.0)) == 9.0


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_saved_value_that_others_hold_stays_live(kind, is_cached):
    values = tuple(replace(v, is_kept=v.name == "b", cached=is_cached and v.name == "b") for v in kind.values)
    outcome = run_block(replace(kind, values=values), checkpoint_plan(kind))
    assert outcome.stored_bytes == 100 + 20
    assert outcome.live_bytes == (100 if is_cached else 120), "a cached cast is live in autocast's cache anyway"
