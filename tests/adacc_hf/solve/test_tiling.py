"""Which blocks get tiles, and how many."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.solve.solver import quick_least_policy
from adacc_hf.solve.tiling import with_fewest_tiles


@pytest.fixture
def profile(one_thread, few_rows, tiny_llama):
    ids = torch.randint(3, 60, (1, 60))
    model = tiny_llama(intermediate_size=512, layers=4)
    return profile_model(model, {"input_ids": ids, "labels": ids}, AdaccConfig())


def numbers_of(policy):
    return [tiling.num_tiles if (tiling := policy.plan_of(name).tiling) else 0 for name, _ in policy.blocks]


def test_tiles_lower_the_least_peak_where_the_config_allows_them(profile):
    untiled = quick_least_policy(profile, AdaccConfig(actions=("retain", "compress", "recompute")))
    least = quick_least_policy(profile)
    assert numbers_of(untiled) == [0] * 4
    assert any(numbers_of(least))
    assert least.predicted_peak_bytes < untiled.predicted_peak_bytes


def test_each_block_gets_the_fewest_tiles_that_fit(profile):
    tiled = profile.with_tiles([32] * 4)
    plans = [recompute_plan(tiled.kind_of(block)) for block in tiled.blocks]
    least, most = (
        simulate(tiled, plans).peak_bytes,
        simulate(profile.with_tiles([2] * 4), [recompute_plan(profile.kinds[1].in_tiles(2))] * 4).peak_bytes,
    )
    assert least < most
    for budget in (least, (least + most) // 2, most, 2 * most):
        chosen = with_fewest_tiles(profile, plans, budget)
        numbers = [plan.tiling.num_tiles for plan in chosen]
        assert simulate(profile, chosen).peak_bytes <= budget
        for index, number in enumerate(numbers):
            if number > 2:
                fewer = [*numbers[:index], number // 2, *numbers[index + 1 :]]
                plans_of = [recompute_plan(profile.kinds[1].in_tiles(each)) for each in fewer]
                assert simulate(profile, plans_of).peak_bytes > budget, "fewer tiles would fit too"
    assert numbers == [2] * 4
