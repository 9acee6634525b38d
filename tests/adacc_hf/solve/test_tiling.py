"""Which blocks get tiles, and how many."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.solve.tiling import tiled_profiles, with_fewest_tiles


@pytest.fixture
def profile(one_thread, few_rows, tiny_llama):
    ids = torch.randint(3, 60, (1, 60))
    model = tiny_llama(intermediate_size=512, layers=4)
    return profile_model(model, {"input_ids": ids, "labels": ids}, AdaccConfig())


def numbers_of(profile):
    tilings = [profile.kind_of(block).tiling for block in profile.blocks]
    return [tiling.num_tiles if tiling else 0 for tiling in tilings]


def test_the_last_blocks_get_tiles_first(profile):
    numbers = [numbers_of(each) for each in tiled_profiles(profile, AdaccConfig())]
    assert numbers == [[0, 0, 0, 0], [32] * 4, [0, 0, 32, 32], [0, 0, 0, 32]]
    exact = AdaccConfig(actions=("retain", "recompute"))
    assert [numbers_of(each) for each in tiled_profiles(profile, exact)] == [[0] * 4]
    assert [numbers_of(each) for each in tiled_profiles(profile, AdaccConfig(max_error=0.0))] == [[0] * 4]


def test_each_block_gets_the_fewest_tiles_that_fit(profile):
    tiled = profile.with_tiles([32] * 4)
    plans = [recompute_plan(tiled.kind_of(block)) for block in tiled.blocks]
    least, most = (
        simulate(tiled, plans).peak_bytes,
        simulate(profile.with_tiles([2] * 4), [recompute_plan(profile.kinds[1].in_tiles(2))] * 4).peak_bytes,
    )
    assert least < most
    for budget in (least, (least + most) // 2, most, 2 * most):
        chosen, chosen_plans = with_fewest_tiles(tiled, plans, budget)
        numbers = numbers_of(chosen)
        assert simulate(profile, chosen_plans).peak_bytes <= budget
        for index, number in enumerate(numbers):
            if number > 2:
                fewer = [*numbers[:index], number // 2, *numbers[index + 1 :]]
                plans_of = [recompute_plan(profile.kinds[1].in_tiles(each)) for each in fewer]
                assert simulate(profile, plans_of).peak_bytes > budget, "fewer tiles would fit too"
    assert numbers == [2] * 4
