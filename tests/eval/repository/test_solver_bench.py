"""The solver's benchmark on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.eval.repository import solver_bench
from adacc_hf.eval.trials.workload import Workload


def test_record_and_table(tiny: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bench.json"
    cases = (tiny, replace(tiny, attention="eager"))
    assert solver_bench.main(["--step", "45", "--repeats", "1", "--output", str(output)], cases) == 0
    record = json.loads(output.read_text())
    assert record["run_info"]["percents"] == [5, 50, 95]
    points = record["train_info"]["points"]
    assert list(points) == ["sdpa, 2 blocks", "eager, 2 blocks"]
    assert all(list(point) == ["stored", "peak"] for point in points.values())
    for row in [row for point in points.values() for row in point.values()]:
        seconds = list(row["seconds"].values())
        assert list(row["seconds"]) == ["5", "50", "95"]
        assert (row["median_seconds"], row["max_seconds"]) == (sorted(seconds)[1], max(seconds))
        assert row["seconds"][str(row["slowest_percent"])] == row["max_seconds"]
        assert 95 not in row["infeasible_percents"]
        assert row["num_blocks"] == 2
        assert 0.0 <= row["gap"]["median"] <= row["gap"]["high"] < 1.0
    # Parameters alone need more than a twentieth of the peak.
    assert all(5 in point["peak"]["infeasible_percents"] for point in points.values())
    assert "| gpt2, eager, 2 blocks" in capsys.readouterr().out
