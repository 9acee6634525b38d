"""What evolution gains, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import evolution
from adacc_hf.eval.schemas import check_record
from adacc_hf.eval.workload import Workload


def test_both_cases_leave_a_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "evolution.json"
    workload = Workload(width=32, layers=2, heads=2, batch=1, tokens=64)
    argv = ["--steps", "4", "--rounds", "1", "--batches", "2", "--output", str(output)]
    assert evolution.main(argv, workload) == 0
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert list(points) == ["stdlib text, batch 2", "constructed, batch 2"]
    for point in points.values():
        assert point["num_changes"] == len(point["changes"])
        assert all(change["reason"] for change in point["changes"])
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out
