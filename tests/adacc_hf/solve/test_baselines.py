"""The bandwidths of the paper's Table 1, from its numbers and by hand, and the order of actions that they give."""

from __future__ import annotations

import pytest

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import Action
from adacc_hf.solve.baselines import bandwidths, greedy_policies
from adacc_hf.solve.milp import build_block_model

PAPER = [  # tensor MB, recompute ms, compression ms, MB after compression, best action
    (96, 0.36, 0.37, 24, Action.RECOMPUTE),
    (42, 1.02, 0.16, 12, Action.COMPRESS),
    (42, 0.58, 0.16, 12, Action.COMPRESS),
]


@pytest.mark.parametrize(("size", "recompute_ms", "compress_ms", "payload", "winner"), PAPER)
def test_the_paper_s_tensors_go_the_paper_s_way(
    tape_builder, make_codec, size, recompute_ms, compress_ms, payload, winner
):
    tape = tape_builder()
    start = tape.value("input", 8)
    (tensor,) = tape.operator("f", [start], [("T", size)], ms=recompute_ms, save=[-1])
    tape.values[tensor]["codecs"] = (make_codec("int4", payload, compress_ms / 2, compress_ms / 2),)
    rows = {row.value: row for row in bandwidths(build_block_model(tape.kind(), AdaccConfig()))}
    assert rows[tensor].choice.action is winner
    assert rows[tensor].recompute == pytest.approx(size / recompute_ms)
    assert rows[tensor].compress == pytest.approx((size - payload) / compress_ms)
    assert rows[start].choice.action is Action.RETAIN  # no action saves the block input's bytes


def test_policies_store_less_and_less_and_take_longer(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=3, attention="eager")
    models = [build_block_model(kind, AdaccConfig()) for kind in profile.kinds]
    policies = list(greedy_policies(profile, models))
    assert all(column.plan.is_plain for column in policies[0])
    ms = [sum(column.ms for column in policy) for policy in policies]
    assert ms == sorted(ms)
    # One activation of one block at a time, each changed once.
    assert len(policies) == 1 + 3 * sum(row.choice.action is not Action.RETAIN for row in bandwidths(models[0]))


def test_a_budget_below_the_rule_s_end_is_refused(gpt2_like_profile, solve_greedy):
    profile = gpt2_like_profile(num_blocks=2)
    with pytest.raises(InfeasibleBudgetError, match="greedy rule ends at") as error:
        solve_greedy(profile, 0.001)
    least = error.value.smallest_budget_bytes
    assert solve_greedy(profile, least / profile.plain_stored_bytes).predicted_stored_bytes == least
    assert solve_greedy(profile, 1.0).is_plain
