"""The order of plans over the blocks and the least peak, against all orders and policies of small profiles."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.solve.frontier import frontiers
from adacc_hf.solve.linear_program import SolverLog
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.minimum_peak import PeakOracle

SOLVING = settings(max_examples=30, **SLOW_EXAMPLES)


def frontiers_of(profile):
    return frontiers(SolverLog(), [build_block_model(kind, AdaccConfig()) for kind in profile.kinds])


@SOLVING
@given(data=st.data())
def test_the_least_peak_is_that_of_the_best_policy_there_is(profiles, data):
    profile = data.draw(profiles(num_kinds=2, max_blocks=2))
    columns = frontiers_of(profile)
    oracle = PeakOracle(profile)
    menus = [columns[block.kind] for block in profile.blocks]
    best = min(oracle.peak_bytes(policy) for policy in itertools.product(*menus))
    least = oracle.least_peak(columns)
    assert oracle.peak_bytes(least) == best
    assert simulate(profile, [column.plan for column in least]).peak_bytes == best


@SOLVING
@given(data=st.data())
def test_the_quick_peak_is_the_timeline_s_peak(profiles, data):
    profile = data.draw(profiles(num_kinds=2, max_blocks=3))
    columns = frontiers_of(profile)
    policy = [data.draw(st.sampled_from(columns[block.kind])) for block in profile.blocks]
    oracle, outcome = PeakOracle(profile), simulate(profile, [column.plan for column in policy])
    assert oracle.peak_bytes(policy) == outcome.peak_bytes
    block = oracle.peak_block(policy)
    where = {label.split()[-1] for label, nbytes in outcome.timeline if nbytes == outcome.peak_bytes}
    assert block is None or profile.blocks[block].name in where
    assert block is not None or not where & {b.name for b in profile.blocks}


def test_the_arranged_order_is_the_best_order(gpt2_like_profile):
    from dataclasses import replace

    # No head, because it would have the peak in any order. Gradients are live from the start, as when they accumulate.
    # Otherwise the base of the first blocks is higher.
    profile = replace(gpt2_like_profile(num_blocks=5), outside_peak_bytes=0, loss_peak_bytes=0)
    base = profile.blocks[0].backward_base_bytes
    profile = replace(
        profile, blocks=tuple(replace(b, forward_base_bytes=0, backward_base_bytes=base) for b in profile.blocks)
    )
    columns = frontiers_of(profile)[0]
    oracle = PeakOracle(profile)
    policy = [columns[i] for i in (0, 3, len(columns) - 1, 0, 5)]
    peaks = {oracle.peak_bytes(order) for order in itertools.permutations(policy)}
    assert oracle.peak_bytes(oracle.sort_for_peak(policy)) == min(peaks) < max(peaks)


def test_columns_stay_with_their_kind(gpt2_like_profile, profile_of):
    kinds = [gpt2_like_profile(attention=attention).kinds[0] for attention in ("sdpa", "eager")]
    profile = profile_of(kinds, [0, 1, 0, 1, 1], gpt2_like_profile(attention="eager").shared)
    columns = frontiers_of(profile)
    policy = [columns[block.kind][i % 3] for i, block in enumerate(profile.blocks)]
    sorted_policy = PeakOracle(profile).sort_for_peak(policy)
    assert [c.plan.kind for c in sorted_policy] == [profile.kind_of(block).digest for block in profile.blocks]
    assert sorted(map(id, sorted_policy)) == sorted(map(id, policy))
