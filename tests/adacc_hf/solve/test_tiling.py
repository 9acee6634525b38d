"""Which blocks get tiles."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.solve.solver import quick_least_policy


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
