"""The simulator against steps calculated by hand, and against the totals that the solver computes in another way."""

from dataclasses import replace

import pytest

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.policy import (
    RECOMPUTE,
    RETAIN,
    Action,
    Choice,
    Plan,
)
from adacc_hf.solve.simple_policies import uniform_policy


def plan_of(kind, **choices):
    """Return the plan with the given choices for the named values; the others are retained."""
    return Plan(
        kind=kind.digest, choices=tuple((value.index, choices.get(value.name, RETAIN)) for value in kind.activations)
    )


@pytest.fixture
def kind(tape_builder, make_codec):
    """input(100) -> a(10), copy(3) -> b(20) -> c(40); a, b and c are saved, each by its own operator."""
    tape = tape_builder()
    start = tape.value("input", 100)
    a, _ = tape.operator("f", [start], [("a", 10), ("copy", 3)], ms=1.0, save=[-2])
    (b,) = tape.operator("g", [a], [("b", 20)], ms=2.0, save=[-1])
    tape.operator("h", [b], [("c", 40)], ms=4.0, save=[-1])
    tape.values[b]["codecs"] = (make_codec("int4", 5, 0.25, 0.5),)
    return tape.kind()


INT4 = Choice(action=Action.COMPRESS, codec="int4", options=(("group_size", 64),))


def test_what_autograd_does_not_save_is_stored_only_if_a_replay_reads_it(kind):
    assert run_block(kind, plan_of(kind)).stored_bytes == 10 + 20 + 40
    assert run_block(kind, plan_of(kind, b=RECOMPUTE)).stored_bytes == 10 + 40
    assert run_block(kind, plan_of(kind, a=RECOMPUTE)).stored_bytes == 100 + 20 + 40


def test_retained_values_die_when_their_slot_is_released(kind):
    outcome = run_block(kind, plan_of(kind))
    # Unpack and then release; for c, b, a.
    assert outcome.moments == (70, 70, 30, 30, 30, 10, 10, 10, 0)
    assert outcome.overhead_ms == 0.0


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


def test_the_step_adds_up(kind, profile_of):
    profile = profile_of([kind], [0, 0], gradient_bytes=50)
    outcome = simulate(profile, [plan_of(kind, b=RECOMPUTE), plan_of(kind)])
    assert outcome.stored_bytes == 100 + 50 + 70
    assert outcome.overhead_ms == 2.0
    live = {}
    for label, nbytes in outcome.timeline:
        live[label] = max(live.get(label, 0), nbytes)
    assert live == {
        "forward h.0": 1100 + 50,
        "forward h.1": 1100 + 50 + 70,
        "head and loss": 1300 + 50 + 70,
        "backward of head and loss": 1250 + 50 + 70,
        "backward h.1": 1000 + 50 + 50 + 70,
        "backward h.0": 1000 + 100 + 50,
        "before or after the blocks": 1200,
    }
    assert (outcome.peak_label, outcome.peak_bytes) == ("head and loss", 1420)


def test_a_stored_cast_counts_once_forward_has_let_go_of_its_cache(kind, profile_of):
    """A cast stored by a block counts only after forward has freed autocast's cache, which holds all casts until
    then."""
    values = tuple(replace(value, cached=value.name == "b") for value in kind.values)
    cast = next(value for value in values if value.cached)
    profile = profile_of([replace(kind, values=values)], [0], loss_peak_bytes=1300)
    live = dict(simulate(profile, [plan_of(kind)]).timeline)
    assert live["backward of head and loss"] == live["head and loss"] + cast.nbytes


def test_shared_tensors_count_once_if_saved_or_read(tape_builder, profile_of):
    from adacc_hf.artifacts.profile import Shared

    tape = tape_builder()
    start, mask = tape.value("input", 100), tape.value("mask", 30, shared=0)
    tape.operator("where", [start, mask], [("a", 10)], ms=1.0, save=[-1])
    kind = tape.kind()
    for saved, read_bytes in ((False, 30), (True, 0)):
        profile = profile_of([kind], [0, 0, 0], [Shared(name="mask", nbytes=30, saved=saved)])
        retained_bytes = simulate(profile, [plan_of(kind)] * 3).stored_bytes
        assert retained_bytes == profile.plain_stored_bytes
        recomputed = simulate(profile, [plan_of(kind, a=RECOMPUTE)] * 3).stored_bytes
        assert recomputed - retained_bytes == 3 * 90 + read_bytes


def test_a_shared_tensor_is_live_from_the_first_block_whose_replay_reads_it_on(tape_builder, profile_of):
    from adacc_hf.artifacts.profile import Shared

    tape = tape_builder()
    start, mask = tape.value("input", 100), tape.value("mask", 30, shared=0)
    tape.operator("where", [start, mask], [("a", 10)], ms=1.0, save=[-1])
    kind = replace(tape.kind(), held=(0,))
    profile = profile_of(
        [kind], [0, 0, 0], [Shared(name="mask", nbytes=30, saved=False)], gradient_bytes=40, outside_live_bytes=25
    )
    keep, recompute = plan_of(kind), plan_of(kind, a=RECOMPUTE)
    # Each measured base, of 1040, 1080 and 1120 bytes, includes the mask.
    for plans, unread in (
        ((keep, keep, keep), (30, 30, 30, 30, 25)),
        ((keep, recompute, keep), (30, 0, 0, 0, 0)),
        ((recompute, keep, keep), (0, 0, 0, 0, 0)),
    ):
        live = {}
        for label, nbytes in simulate(profile, plans).timeline:
            live[label] = max(live.get(label, 0), nbytes)
        stored = [100 if plan is recompute else 10 for plan in plans]
        extra = [10 if plan is recompute else 0 for plan in plans]
        assert live["backward h.0"] == 1120 + stored[0] + extra[0] - unread[0]
        assert live["backward h.1"] == 1080 + sum(stored[:2]) + extra[1] - unread[1]
        assert live["backward h.2"] == 1040 + sum(stored) + extra[2] - unread[2]
        assert live["backward of head and loss"] == 1250 + sum(stored) - unread[3]
        assert live["head and loss"] == 1300 + sum(stored) - unread[4]


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


def test_retaining_everything_is_plain_training(gpt2_like_profile):
    for attention in ("sdpa", "eager"):
        profile = gpt2_like_profile(num_blocks=3, attention=attention)
        policy = uniform_policy(profile, "retain")
        assert policy.predicted_stored_bytes == profile.plain_stored_bytes
        assert policy.predicted_overhead_ms == 0.0
