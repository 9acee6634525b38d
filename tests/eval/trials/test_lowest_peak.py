"""Going back to code with a lower peak, on policies that are made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.compiler import AdaccPartitioner
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.region import CompiledPolicy, RegionPlan
from adacc_hf.eval.trials.lowest_peak import LowestPeak


class Partitioner(AdaccPartitioner):
    """Has a policy as if it had been compiled and looked at."""

    def compiled(self, share: float | None, peak: int | None, *stored: str) -> None:
        code_bytes = None if peak is None else (0, peak)
        plan = RegionPlan(digest="d", code_bytes=code_bytes, stored=tuple((name, RETAIN) for name in stored))
        self.policy = CompiledPolicy(share=share, regions=(plan,))

    def look_at_code(self) -> None:
        """It was looked at."""


@pytest.fixture
def lowest() -> Iterator[LowestPeak]:
    installed = InstalledPartitioner(Partitioner(memory_budget=0.5))
    yield LowestPeak(installed)
    installed.remove()


def _went_back(lowest: LowestPeak, share: float | None, peak: int | None, *stored: str) -> bool:
    installed = lowest.installed
    installed.compile_again()
    installed.partitioner.compiled(share, peak, *stored)
    installed._num_counted = 1
    lowest.look_at_code()
    return lowest.keep_lowest()


def test_a_smaller_share_never_ends_with_a_higher_peak(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.8, 100, "a", "b", "c")
    assert not _went_back(lowest, 0.6, 80, "a", "b")
    assert _went_back(lowest, 0.5, 90, "a")
    assert lowest.installed.partitioner.policy.share == 0.6
    assert [plan.stored for plan in lowest.installed.partitioner._known.values()] == [(("a", RETAIN), ("b", RETAIN))]
    assert _went_back(lowest, None, 85)
    # As much, and nothing gained.
    assert _went_back(lowest, 0.4, 80, "b")
    assert not _went_back(lowest, 0.3, 70, "b")


def test_a_larger_share_is_no_reason_to_go_back(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.4, 50, "a")
    assert not _went_back(lowest, 0.6, 80, "a", "b")


def test_the_same_plan_and_unknown_peaks_are_left_as_they_are(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.6, 80, "a")
    assert not _went_back(lowest, 0.5, 90, "a")
    assert not _went_back(lowest, 0.4, None)
