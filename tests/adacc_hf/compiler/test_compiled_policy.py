"""The file of decisions for compiled regions."""

import json
from pathlib import Path

import pytest

from adacc_hf import PolicyMismatchError
from adacc_hf.artifacts.policy import RETAIN, Action, Choice
from adacc_hf.compiler import CompiledPolicy, RegionPlan

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


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "other"}, {"regions": [{}]}, {"regions": None}])
def test_other_files_are_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "policy.json"
    POLICY.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PolicyMismatchError, match="is not a complete compiled policy of version 4"):
        CompiledPolicy.load(path)
