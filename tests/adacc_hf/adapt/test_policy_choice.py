"""PolicyChoice: each size of batch gets a policy of its own, before its first micro-batch."""

from __future__ import annotations

from run_builders import events, run_lengths

from adacc_hf import AdaccCallback
from adacc_hf.adapt.policy_choice import PolicyChoice


def test_other_lengths_get_policies_of_their_own(make_trainer):
    """Each size's policy is set before its first batch, extrapolated from parts of the first batch."""
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    lengths = [16] * 4 + [32] * 30 + [9, 16, 8, 32] * 10
    run_lengths(make_trainer, lengths, [callback])
    policy_events = events(callback, "policy")
    assert [(event["step"], event.get("reason")) for event in policy_events] == [
        (0, None),
        (5, "for batches of input_ids 4x40, labels 4x40"),
        (35, "for batches of input_ids 4x9, labels 4x9"),
        (37, "for batches of input_ids 4x8, labels 4x8"),
    ]
    stored_bytes = [event["stored_bytes"] for event in policy_events]
    assert stored_bytes[3] < stored_bytes[2] < stored_bytes[0] < stored_bytes[1]


def test_other_lengths_get_policies_of_their_own_where_the_first_batch_leaves_blocks_out(make_trainer, late_policy):
    """The first longer batch runs under torch's checkpoint, and the next one is profiled for all sizes. Later sizes
    have a policy before their first batch."""
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    lengths = [16] * 4 + [32] * 30 + [9, 16, 8, 32] * 10
    run_lengths(make_trainer, lengths, [callback])
    policy_events = events(callback, "policy")
    # The first policy is set at step 2. The first batch of 32 tokens comes at step 5, those of 9 and 8 at 35 and 37.
    assert [(event["step"], event.get("reason")) for event in policy_events] == [
        (2, None),
        (6, "for batches of input_ids 4x32, labels 4x32"),
        (35, "for batches of input_ids 4x9, labels 4x9"),
        (37, "for batches of input_ids 4x8, labels 4x8"),
    ]


def test_lengths_that_differ_from_the_first_steps_on_are_never_without_a_policy(make_trainer, monkeypatch):
    is_unplanned = []
    original = PolicyChoice.choose

    def choose(choice, shapes, nbytes):
        original(choice, shapes, nbytes)
        is_unplanned.append(choice.current is None)

    monkeypatch.setattr(PolicyChoice, "choose", choose)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    run_lengths(make_trainer, [24, 20, 32, 17, 30, 9, 32, 25, 11], [callback])
    assert len(is_unplanned) == 9
    assert not any(is_unplanned)
