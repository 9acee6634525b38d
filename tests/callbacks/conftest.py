"""Fixtures of the tests that run a Trainer: all those of tests/builders/trainer_builders.py."""

import pytest
from counted_times import *  # noqa: F403
from trainer_builders import *  # noqa: F403


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Apply `one_thread` to all tests of this folder, because they train small models."""
