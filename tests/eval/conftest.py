"""Workloads so small that a runner completes in seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adacc_hf.eval.workload import Workload


@pytest.fixture(autouse=True, scope="module")
def _threads_as_before() -> Iterator[None]:
    """Runners set the number of torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Workload:
    """Its larger activations are 64 KiB and more, so that they may be compressed."""
    return Workload(width=32, layers=2, heads=2, batch=4, tokens=128)
