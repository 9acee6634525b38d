"""What evolution gains, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf import Policy, judging
from adacc_hf.eval import evolution, evolution_case
from adacc_hf.eval.schemas import check_record
from adacc_hf.eval.workload import Workload

TINY = Workload(width=64, layers=2, heads=2, batch=1, tokens=32)


def test_outliers_come_and_go_and_the_policy_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for module in (evolution_case, judging):  # not the solver, whose choice depends on the prices of the day
        monkeypatch.setattr(module, "solve_policy", lambda profile, *_, **__: Policy.uniform(profile, "compress"))
    output = tmp_path / "evolution.json"
    options = ["--steps", "20", "--rounds", "2", "--batches", "4", "--budget", "1.0", "--output", str(output)]
    assert evolution.main(options, TINY) == 0
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert list(points) == ["stdlib text, batch 4", "constructed, batch 4"]
    found = points["constructed, batch 4"]
    counts = dict(found["outliers"])
    assert list(counts) == [1, 2, 4, 8, 16]
    # Planted until step 1 and from step 7 to 12, in both norms and c_fc.
    assert counts[8] > max(counts[4], counts[16])
    assert found["changes"]
    for change in found["changes"]:
        assert change["reason"]
        # As in test_memory.py: scalars that the profiler does not see, in a model of half a megabyte.
        assert change["measured_peak_bytes"] == pytest.approx(change["predicted_peak_bytes"], rel=0.01)
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out
    for name in ("evolution.svg", "evolution_outliers.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")


def test_the_share_of_a_long_run_counts_the_tracking_steps_of_the_default_schedule() -> None:
    class Costs:
        ms_per_tracking, normal_step_ms = 20.0, 10.0

    # 1, 2, 4, ... 1024 are 11 tracking steps.
    assert evolution.share_in_long_run(Costs) == pytest.approx(220 / 20220)
