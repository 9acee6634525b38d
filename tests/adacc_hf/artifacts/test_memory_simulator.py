"""The simulator against steps calculated by hand, and against the totals that the solver computes in another way."""

from dataclasses import replace

from profile_builders import plan_of

from adacc_hf.artifacts.memory_simulator import plain_blocks_ms, simulate
from adacc_hf.artifacts.policy import RECOMPUTE
from adacc_hf.artifacts.profile import Shared
from adacc_hf.solve.simple_policies import uniform_policy


def highest_by_label(outcome):
    """Return the most live bytes of each part of a step."""
    return {label: max(nbytes for other, nbytes in outcome.timeline if other == label) for label, _ in outcome.timeline}


def masked_kind(tape):
    """Return a kind whose operator reads a shared mask."""
    start, mask = tape.value("input", 100), tape.value("mask", 30, shared=0)
    tape.operator("where", [start, mask], [("a", 10)], ms=1.0, save=[-1])
    return tape.kind()


def test_the_step_adds_up(kind, profile_of):
    profile = profile_of([kind], [0, 0], gradient_bytes=50)
    outcome = simulate(profile, [plan_of(kind, b=RECOMPUTE), plan_of(kind)])
    assert outcome.stored_bytes == 100 + 50 + 70
    assert outcome.overhead_ms == 2.0
    assert highest_by_label(outcome) == {
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
    """A cast stored by a block counts only after forward has freed autocast's cache, which holds it till then."""
    values = tuple(replace(value, cached=value.name == "b") for value in kind.values)
    cast = next(value for value in values if value.cached)
    profile = profile_of([replace(kind, values=values)], [0], loss_peak_bytes=1300)
    live = dict(simulate(profile, [plan_of(kind)]).timeline)
    assert live["backward of head and loss"] == live["head and loss"] + cast.nbytes


def test_shared_tensors_count_once_if_saved_or_read(tape_builder, profile_of):
    kind = masked_kind(tape_builder())
    for saved, read_bytes in ((False, 30), (True, 0)):
        profile = profile_of([kind], [0, 0, 0], [Shared(name="mask", nbytes=30, saved=saved)])
        retained_bytes = simulate(profile, [plan_of(kind)] * 3).stored_bytes
        assert retained_bytes == profile.plain_stored_bytes
        recomputed = simulate(profile, [plan_of(kind, a=RECOMPUTE)] * 3).stored_bytes
        assert recomputed - retained_bytes == 3 * 90 + read_bytes


def test_a_shared_tensor_is_live_from_the_first_block_whose_replay_reads_it_on(tape_builder, profile_of):
    kind = replace(masked_kind(tape_builder()), held=(0,))
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
        live = highest_by_label(simulate(profile, plans))
        stored = [100 if plan is recompute else 10 for plan in plans]
        extra = [10 if plan is recompute else 0 for plan in plans]
        assert live["backward h.0"] == 1120 + stored[0] + extra[0] - unread[0]
        assert live["backward h.1"] == 1080 + sum(stored[:2]) + extra[1] - unread[1]
        assert live["backward h.2"] == 1040 + sum(stored) + extra[2] - unread[2]
        assert live["backward of head and loss"] == 1250 + sum(stored) - unread[3]
        assert live["head and loss"] == 1300 + sum(stored) - unread[4]


def test_retaining_everything_is_plain_training(gpt2_like_profile):
    for attention in ("sdpa", "eager"):
        profile = gpt2_like_profile(num_blocks=3, attention=attention)
        policy = uniform_policy(profile, "retain")
        assert policy.predicted_stored_bytes == profile.plain_stored_bytes
        assert policy.predicted_overhead_ms == 0.0


def test_the_blocks_of_a_plain_step_take_three_forwards(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=4)
    assert plain_blocks_ms(profile) == 3 * uniform_policy(profile, "recompute").predicted_overhead_ms > 0
    assert plain_blocks_ms(replace(profile, step_ms=1000.0, head_ms=1000.0)) == plain_blocks_ms(profile)
