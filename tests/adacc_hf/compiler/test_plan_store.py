"""Stored plans that a later run reuses."""

from pathlib import Path

import pytest
from torch._inductor import config as inductor

from adacc_hf.compiler import AdaccPartitioner, RegionPlan, partitioner
from adacc_hf.compiler.compiled_policy import PlanStore
from adacc_hf.compiler.graph_cost import OperatorTimes

PLAN = RegionPlan(digest="a", region="3", plain_bytes=10, stored_bytes=5)


def test_a_plan_is_found_by_its_graph_and_who_decided(tmp_path: Path) -> None:
    PlanStore(tmp_path / "new").save("me", PLAN)
    store = PlanStore(tmp_path / "new")
    assert store.load("me", "a") == PLAN
    assert store.load("you", "a") is None
    assert store.load("me", "b") is None


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}], ids=str)
def test_nothing_is_kept_where_there_is_no_code_to_find(tmp_path: Path, setting: dict[str, bool]) -> None:
    store = PlanStore(tmp_path)
    with inductor.patch(setting):
        store.save("me", PLAN)
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_decides_alike_whatever_operators_cost_then(train_step, tmp_path, monkeypatch):
    def run() -> RegionPlan:
        partitioner = AdaccPartitioner(store=PlanStore(tmp_path), memory_budget=0.8, actions=("retain", "recompute"))
        train_step(partitioner)
        return partitioner.policy.regions[0]

    first = run()
    assert first.stored
    monkeypatch.setattr(OperatorTimes, "replay_ms", lambda times, node: pytest.fail("priced again"))
    assert run() == first


def test_another_device_decides_by_its_own_prices(train_step, tmp_path, monkeypatch):
    for name in ("one", "other", "other"):
        monkeypatch.setattr(partitioner, "device_name", lambda device, name=name: name)
        train_step(AdaccPartitioner(store=PlanStore(tmp_path), memory_budget=0.8))
    assert len(list(tmp_path.iterdir())) == 2
