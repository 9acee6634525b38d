"""Fixtures of the tests of the controller, which run a Trainer: all those of tests/builders/trainer_builders.py."""

import pytest
from trainer_builders import *  # noqa: F403

from adacc_hf.solve.simple_policies import uniform_policy


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Apply `one_thread` to all tests of this folder, because they train small models."""


@pytest.fixture
def fake_profile(gpt2_like_profile):
    return gpt2_like_profile()


@pytest.fixture
def recomputing(fake_profile):
    return uniform_policy(fake_profile, "recompute")
