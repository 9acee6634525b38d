"""A small GPT-2, its profile, and the policy that recomputes everything."""

import pytest

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.fixture
def gpt2(tiny_gpt2):
    return tiny_gpt2()


@pytest.fixture(scope="module")
def gpt2_profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2(), token_batch(), AdaccConfig(min_compress_bytes=0))


@pytest.fixture
def recomputing(gpt2_profile):
    return uniform_policy(gpt2_profile, "recompute")
