"""The file of decisions for compiled regions, plans that a later run reuses, and module paths of graph nodes."""

import json
from pathlib import Path

import pytest
from torch import fx
from torch._inductor import config as inductor

from adacc_hf import PolicyMismatchError
from adacc_hf.artifacts.policy import RETAIN, Action, Choice
from adacc_hf.compiler import AdaccPartitioner, CompiledPolicy, RegionPlan, partitioner
from adacc_hf.compiler.compiled_policy import PlanStore, module_path
from adacc_hf.compiler.graph_cost import OperatorTimes

INT8 = Choice(action=Action.COMPRESS, codec="int8", options=(("group_size", 64),))
POLICY = CompiledPolicy(
    share=0.5,
    regions=(
        RegionPlan(digest="a", region="0", plain_bytes=100, stored_bytes=60, overhead_ms=1.5, stored=(("mul", INT8),)),
        RegionPlan(digest="b", region="1", plain_bytes=10, stored_bytes=10, reason="everything fits"),
        RegionPlan(digest="c", region="0", plain_bytes=50, stored_bytes=30, stored=(("add", RETAIN), ("mul", INT8))),
    ),
)


def test_a_policy_comes_back_from_its_file(tmp_path: Path) -> None:
    POLICY.save(tmp_path / "policy.json")
    assert CompiledPolicy.load(tmp_path / "policy.json") == POLICY


def test_a_region_compiled_for_two_sizes_counts_once() -> None:
    assert [plan.digest for plan in POLICY.call_plans] == ["c", "b"]
    assert (POLICY.plain_bytes, POLICY.stored_bytes) == (60, 40)


def test_summaries_tell_what_is_stored_or_why_nothing_was_decided() -> None:
    assert POLICY.regions[0].summary() == (
        "region 0: 60 B of 100 B stored in 0 tensors retained and 1 compressed; overhead 1.50 ms"
    )
    assert POLICY.regions[1].summary() == "region 1: partitioned by torch.compile: everything fits"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2, this release reads 5"),
        ({"format": "other"}, "is not an adacc_hf compiled_policy file"),
        ({"regions": [{}]}, "is a damaged compiled_policy file"),
        ({"regions": None}, "is a damaged compiled_policy file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "policy.json"
    POLICY.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PolicyMismatchError, match=f"{message}.*: delete it to plan the regions again"):
        CompiledPolicy.load(path)


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].transformer.h.0.mlp", "transformer.h.0.mlp"),
        ("L['self']", ""),
        ("L['self'].module.h.1", "h.1"),
        ("L['self']._orig_mod.h.1", "h.1"),
        ("h.1", "h.1"),
    ],
)
@pytest.mark.parametrize("kind", ["nn_module_stack", "fwd_nn_module_stack"])
def test_module_paths_begin_at_the_model(path: str, expected: str, kind: str) -> None:
    node = fx.Graph().placeholder("x")
    assert module_path(node) == ""
    node.meta[kind] = {"outer": ("L['self']", object), "inner": (path, object)}
    assert module_path(node) == expected
