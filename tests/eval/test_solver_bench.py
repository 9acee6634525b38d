"""The solver's bench on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.eval import solver_bench
from adacc_hf.eval.workload import Workload


def test_record_and_table(tiny: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    cases = (tiny, replace(tiny, attention="eager"))
    assert solver_bench.main(["--step", "45", "--repeats", "1", "--output", str(output)], cases) == 0
    record = json.loads(output.read_text())
    assert record["run_info"]["percents"] == [5, 50, 95]
    rows = record["train_info"]["cases"]
    assert [(row["attention"], row["budget_of"]) for row in rows] == [
        ("sdpa", "stored"), ("sdpa", "peak"), ("eager", "stored"), ("eager", "peak"),
    ]  # fmt: skip
    for row in rows:
        seconds = list(row["seconds"].values())
        assert list(row["seconds"]) == ["5", "50", "95"]
        assert (row["median_seconds"], row["max_seconds"]) == (sorted(seconds)[1], max(seconds))
        assert row["seconds"][str(row["slowest_percent"])] == row["max_seconds"]
        assert 95 not in row["infeasible_percents"]
        assert row["num_blocks"] == 2
    # Parameters alone take more than a twentieth of the peak.
    assert all(5 in row["infeasible_percents"] for row in rows if row["budget_of"] == "peak")
    assert "| eager, 2 blocks" in capsys.readouterr().out
