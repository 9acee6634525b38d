"""The memory and time of one block under its plan, moment by moment, calculated by hand."""

import pytest
from profile_builders import plan_of

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.policy import RECOMPUTE, Action, Choice

INT4 = Choice(action=Action.COMPRESS, codec="int4", options=(("group_size", 64),))


def test_a_replayed_value_serves_a_later_slot_and_then_dies(kind):
    outcome = run_block(kind, plan_of(kind, b=RECOMPUTE, c=RECOMPUTE))
    # c unpacks: g computes b next to the root a, h computes c. b is needed again by its own slot, c dies at its
    # release.
    assert outcome.moments == (30, 70, 70, 70, 30, 30, 30, 10, 10, 10, 0)
    assert outcome.overhead_ms == 6.0


def test_outputs_that_nobody_reads_are_allocated_and_dropped_at_once(kind):
    outcome = run_block(kind, plan_of(kind, a=RECOMPUTE))
    # The root input(100) stays until a, the last slot that needs it, is released; f computes a(10) and copy(3).
    assert outcome.moments == (160, 160, 120, 120, 120, 100, 113, 110, 110, 0)
    assert outcome.overhead_ms == 1.0


def test_a_payload_is_decoded_once_and_lives_as_long_as_a_slot_needs_it(kind):
    outcome = run_block(kind, plan_of(kind, b=INT4, c=RECOMPUTE))
    # c unpacks: b is decoded (20) next to its payload (5) for h; it is kept for its own slot.
    assert outcome.moments == (75, 75, 75, 35, 35, 35, 10, 10, 10, 0)
    assert outcome.overhead_ms == 4.0 + 0.25 + 0.5
    assert outcome.stored_bytes == 15


def test_a_stored_output_of_a_replayed_operator_is_a_copy_that_dies_at_once(tape_builder):
    tape = tape_builder()
    start = tape.value("input", 100)
    tape.operator("split", [start], [("left", 10), ("right", 20)], ms=1.0, save=[-2, -1])
    kind = tape.kind()
    outcome = run_block(kind, plan_of(kind, left=RECOMPUTE))
    # Roots input and right (120); the replay computes left (10) and right again (20), which is dropped. Only left needs
    # the input.
    assert outcome.moments == (150, 130, 130, 130, 130, 20, 0)


def test_a_value_handed_out_twice_lives_until_both_slots_are_released(tape_builder):
    tape = tape_builder()
    start = tape.value("input", 100)
    (a,) = tape.operator("f", [start], [("a", 10)], ms=1.0)
    tape.operator("g", [a], [("b", 7)], ms=1.0, save=[a])
    tape.operator("h", [a], [("c", 9)], ms=1.0, save=[a])
    kind = tape.kind()
    outcome = run_block(kind, plan_of(kind, a=RECOMPUTE))
    assert outcome.overhead_ms == 1.0
    # Computed for h's slot; the root lives as long as a slot needs it, although a is live already.
    assert outcome.moments == (110, 110, 110, 110, 110, 110, 0)


def test_gradients_count_before_and_after_replay(kind, tape_builder):
    tape = tape_builder()
    start = tape.value("input", 100)
    tape.operator("f", [start], [("a", 10)], ms=1.0, save=[-1])
    kind = tape.kind(extra_bytes=8)
    # entry_bytes is 4 and extra_bytes 8 in these tapes.
    assert run_block(kind, plan_of(kind, a=RECOMPUTE)).moments == (114, 114, 118, 8)


def test_plans_that_cannot_be_carried_out_are_refused(tape_builder, make_codec):
    tape = tape_builder()
    start = tape.value("input", 100)
    (noise,) = tape.operator("rand", [start], [("noise", 10)], ms=1.0, replayable=False)
    tape.operator("f", [noise], [("a", 10)], ms=1.0, save=[-1])
    kind = tape.kind()
    with pytest.raises(ValueError, match=r"does not store value 1 \(noise\) of Block, and replay cannot recompute"):
        run_block(kind, plan_of(kind, a=RECOMPUTE))
    with pytest.raises(ValueError, match="has no price for codec 'int4'"):
        run_block(kind, plan_of(kind, a=INT4))
