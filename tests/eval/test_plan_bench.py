"""What plans take: the runner's table and record, from figures that the test makes up and from one real plan."""

import json

import pytest

from adacc_hf.eval.plan_bench import CASES, main, run_plan
from adacc_hf.eval.records.schemas import check_record

FORECAST = {
    "fits": True,
    "peak_bytes": 1,
    "step_ms": 8.0,
    "largest_batch": 3,
    "longest_seq_len": 64,
    "reserved_bytes": None,
}
FIGURES = {
    "status": "measured",
    "wall_seconds": 20.0,
    "cpu_seconds": 12.5,
    "peak_rss_bytes": 2**29,
    "fits": True,
    "budget_bytes": 100,
    "methods": {
        "plain": FORECAST,
        "full recomputation": {**FORECAST, "step_ms": 10.0, "largest_batch": 5},
        "adacc": {**FORECAST, "largest_batch": 9},
    },
}


def test_each_model_is_a_line_and_the_record_is_valid(tmp_path, capsys):
    output = tmp_path / "plan.json"
    assert main(["--output", str(output)], lambda options: FIGURES) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in CASES:
        (line,) = [line for line in lines if line.startswith(f"| {name} ")]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells == [name, "12.5", "20.0", "512.00 MiB", "yes", "3, 5, 9", "0.800"]
    check_record(json.loads(output.read_text()))


def test_a_refused_plan_is_told_apart(tmp_path, capsys):
    output = tmp_path / "plan.json"
    failed = {"status": "error", "reason": "no such thing"}
    assert main(["--cases", "T5-11B", "--output", str(output)], lambda options: failed) == 1
    assert "T5-11B: no such thing" in capsys.readouterr().out
    check_record(json.loads(output.read_text()))


@pytest.mark.parametrize(("batch_size", "status"), [("2", "measured"), ("0", "error")])
def test_a_plan_is_run(batch_size, status):
    figures = run_plan(f"--model demo --batch-size {batch_size} --no-largest")
    assert figures["status"] == status
    if status == "measured":
        assert figures["fits"]
        assert figures["cpu_seconds"] > 0
        assert figures["peak_rss_bytes"] > 2**20
