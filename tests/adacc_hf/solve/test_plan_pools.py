"""Prices in bytes: the least peak does not depend on measured times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES

from adacc_hf import profile_model
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.solve.milp import build_block_model
from adacc_hf.solve.plan_pools import with_times_by_bytes
from adacc_hf.solve.solver import quick_least_policy, solve_policy

SOLVING = settings(max_examples=20, **SLOW_EXAMPLES)


def with_other_times(profile, seed):
    """Return a copy of a profile in which all times differ by random factors from 0.2 to 5."""
    generator = random.Random(seed)
    return with_times(profile, lambda ms: ms * 5 ** generator.uniform(-1, 1))


def with_times(profile, other_ms):
    """Return a copy of a profile in which `other_ms` replaces each time."""

    def other_value(value):
        codecs = tuple(
            replace(option, encode_ms=other_ms(option.encode_ms), decode_ms=other_ms(option.decode_ms))
            for option in value.codecs
        )
        return replace(value, codecs=codecs)

    kinds = tuple(
        replace(
            kind,
            operators=tuple(replace(operator, ms=other_ms(operator.ms)) for operator in kind.operators),
            values=tuple(map(other_value, kind.values)),
        )
        for kind in profile.kinds
    )
    heads = tuple(replace(head, ms=other_ms(head.ms)) for head in profile.other_heads)
    return replace(profile, kinds=kinds, head_ms=other_ms(profile.head_ms), other_heads=heads)


def without_large_head(profile):
    """Return a copy whose peak is in a block, so that the least peak depends on the plans of the blocks."""
    return replace(profile, outside_peak_bytes=profile.static_bytes, loss_peak_bytes=profile.static_bytes)


def least_bytes_of(profile, config=None):
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(profile, 1, config)
    return error.value.smallest_budget_bytes


@SOLVING
@given(data=st.data())
def test_times_do_not_change_the_least_peak(profiles, data):
    profile = data.draw(profiles(num_kinds=2, max_blocks=3))
    other = with_other_times(profile, data.draw(st.integers(0, 1000)))
    least_bytes = least_bytes_of(profile)
    assert least_bytes_of(other) == least_bytes
    assert quick_least_policy(other).predicted_peak_bytes == least_bytes
    assert quick_least_policy(profile).predicted_peak_bytes == least_bytes
    assert solve_policy(other, least_bytes).predicted_peak_bytes <= least_bytes


def test_a_policy_with_the_least_peak_has_measured_times(gpt2_like_profile):
    """The overhead of a policy that was found with prices in bytes is in ms, and grows with the measured times."""
    profile = without_large_head(gpt2_like_profile(num_blocks=3))
    slower = with_times(profile, lambda ms: 2 * ms)
    overheads = [quick_least_policy(each).predicted_overhead_ms for each in (profile, slower)]
    assert overheads[1] == pytest.approx(2 * overheads[0], rel=1e-9)  # sums of the same terms
    assert overheads[0] > 0


def test_prices_are_of_bytes_and_actions_do_not_change(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=1)
    kind, other = (each.kinds[0] for each in (profile, with_other_times(profile, 0)))
    assert with_times_by_bytes(kind) == with_times_by_bytes(other)
    model, priced = (build_block_model(each, AdaccConfig()) for each in (kind, with_times_by_bytes(kind)))
    assert priced.runnable == model.runnable
    assert all(operator.ms > 0 for operator in priced.kind.operators)
    for value, menu in model.menus.items():
        assert [(form.choice, form.nbytes) for form in priced.menus[value]] == [(f.choice, f.nbytes) for f in menu]
        assert all((form.ms > 0) == (form.choice != RETAIN) for form in priced.menus[value])
    assert [plan.plan for plan in priced.checkpoints] == [plan.plan for plan in model.checkpoints]


@pytest.fixture
def llama_profile(one_thread, few_rows, tiny_llama):
    ids = torch.randint(3, 60, (1, 60))
    model = tiny_llama(intermediate_size=512, layers=4)
    return profile_model(model, {"input_ids": ids, "labels": ids}, AdaccConfig())


def numbers_of(policy):
    return [tiling.num_tiles if (tiling := policy.plan_of(name).tiling) else 0 for name, _ in policy.blocks]


def test_tiles_lower_the_least_peak_where_the_config_allows_them(llama_profile):
    untiled = quick_least_policy(llama_profile, AdaccConfig(actions=("retain", "compress", "recompute")))
    least = quick_least_policy(llama_profile)
    assert numbers_of(untiled) == [0] * 4
    assert any(numbers_of(least))
    assert least.predicted_peak_bytes < untiled.predicted_peak_bytes
