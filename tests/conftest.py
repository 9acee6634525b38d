"""What holds for all tests."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair, and no property of ours.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Set before any import of ours, and inherited by subprocesses: no test touches the user's profiles.
_folder = tempfile.TemporaryDirectory(prefix="adacc_hf-tests-")
os.environ["ADACC_HF_PROFILES"] = str(Path(_folder.name) / "profiles")


def pytest_unconfigure() -> None:
    _folder.cleanup()


@pytest.fixture(scope="session")
def one_thread():
    """Sums of floats are made in one order: with several threads torch may split them otherwise from run to run.

    Models as small as those of tests are no faster with two threads either.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def peak_of():
    """`peak_of(policy)`: what the measured peak of a step on the CPU must be equal to.

    Most steps are met to the byte. The rest are scalars, in tensors of 8 bytes each, that operators hold for a while or
    that the Trainer keeps: 248 bytes were the most.
    """
    return lambda policy: pytest.approx(policy.predicted_peak_bytes, abs=512)


@pytest.fixture
def tiny_budgets(monkeypatch):
    """Budgets of a few bytes, for what is a few kilobytes large, are no slips of the pen."""
    from adacc_hf.artifacts.config import check_memory_budget

    monkeypatch.setattr(check_memory_budget, "__defaults__", (1,))
