"""Reasons for actions, on a tape small enough to price by hand."""

from __future__ import annotations

import pytest

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, Choice, Plan
from adacc_hf.reports.explain import activation_rows, check_belongs, explain_policy
from adacc_hf.solve.simple_policies import policy_of_plans, uniform_policy

MIB = 2**20


@pytest.fixture
def kind(tape_builder, make_codec):
    """start -> a (1 ms) -> b (2 ms) -> c (4 ms, random): all saved, b and c with a codec."""
    tape = tape_builder()
    start = tape.value("start", 8 * MIB)
    (a,) = tape.operator("op_a", [start], [("a", 8 * MIB)], 1.0, save=[start, -1])
    (b,) = tape.operator("op_b", [a], [("b", 8 * MIB)], 2.0, save=[-1])
    (c,) = tape.operator("op_c", [b], [("c", 8 * MIB)], 4.0, save=[-1], replayable=False)
    for value, error in ((b, 0.1), (c, 0.0)):
        tape.values[value]["codecs"] = (make_codec("outlier_int4", 2 * MIB, 0.25, 0.125, error),)
    tape.values[a]["too_coarse"] = (("channel_int4", 0.4),)
    return tape.kind()


def plan_of(kind, *choices):
    return Plan(kind=kind.digest, choices=tuple(enumerate(choices)))


def test_replay_ms_counts_the_operators_down_to_what_is_stored(kind) -> None:
    compressed = Choice.compress(kind.values[3].codecs[0])
    rows = activation_rows(kind, plan_of(kind, RETAIN, RECOMPUTE, RECOMPUTE, compressed))
    assert [row[-1].partition(" for ")[0] for row in rows[1:3]] == ["recompute: 1.00 ms", "recompute: 3.00 ms"]


def test_reason_puts_the_chosen_action_first(kind) -> None:
    compressed = Choice.compress(kind.values[3].codecs[0])
    rows = activation_rows(kind, plan_of(kind, RETAIN, RETAIN, RECOMPUTE, compressed))
    assert [row[-1] for row in rows] == [
        "retain: frees nothing; recompute: not possible",
        "retain: frees nothing; recompute: 1.00 ms for 8.00 MiB; channel_int4: no, the gradient error would be 40%",
        "recompute: 2.00 ms for 8.00 MiB; outlier_int4: 0.38 ms for 6.00 MiB, error 0.1",
        "outlier_int4: 0.38 ms for 6.00 MiB, error 0; recompute: not possible",
    ]


def test_codec_without_a_price_is_named(kind) -> None:
    foreign = Choice(action=Action.COMPRESS, codec="int8", options=(("group_size", 32),))
    with pytest.raises(PolicyMismatchError, match=r"\(b\) has no price for codec 'int8' with \{'group_size': 32\}"):
        activation_rows(kind, plan_of(kind, RETAIN, RETAIN, foreign, RETAIN))


def test_explanation_names_blocks_shapes_and_actions(kind, profile_of) -> None:
    profile = profile_of([kind], [0] * 5)
    replay, keep = plan_of(kind, RETAIN, RETAIN, RECOMPUTE, RETAIN), plan_of(kind, RETAIN, RETAIN, RETAIN, RETAIN)
    text = explain_policy(policy_of_plans(profile, [replay, replay, keep, replay, keep]), profile)
    lines = text.splitlines()
    assert lines[0].startswith("Policy: 5 blocks, 17 retain, 0 compress, 3 recompute")
    assert [line for line in lines if line.startswith("Block: ")] == [
        "Block: h.0 to h.1 (2 blocks), h.3",
        "Block: h.2, h.4",
    ]
    row = next(line for line in lines if line.startswith("  b ")).split()
    assert row[:6] == ["b", "uint8[8388608]", "8.00", "MiB", "recompute", "recompute:"]


@pytest.mark.parametrize(
    ("digest", "num_blocks", "message"),
    [
        ("tape", 3, "the policy has 3 blocks, the profile 2"),
        ("other", 2, "the policy has block h.0 of kind other, the profile h.0 of tape"),
    ],
)
def test_policy_of_another_model_is_refused(tape_builder, kind, profile_of, digest, num_blocks, message) -> None:
    tape = tape_builder()
    tape.operator("op", [tape.value("start", 8)], [("a", 8)], 1.0, save=[0])
    foreign = profile_of([tape.kind(digest=digest)], [0] * num_blocks)
    with pytest.raises(PolicyMismatchError, match=message):
        check_belongs(uniform_policy(foreign, "retain"), profile_of([kind], [0, 0]))
