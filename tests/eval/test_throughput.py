"""The table of Figure 5, from invented points and from a tiny model."""

import json
from pathlib import Path

import pytest

from adacc_hf.eval import throughput
from adacc_hf.eval.trials.isolation import run_here

SPEEDS = {"none": 100.0, "full": 75.0, "quantization": 80.0, "adacc": 90.0}


def invented_point(function, order: dict, timeout_s: float) -> dict:
    """Return speeds of SPEEDS per sequence. Beyond 2 sequences plain training does not fit."""
    batch, method = order["subject"]["batch"], order["method"]
    if method == "none" and batch > 2:
        return {"status": "out_of_memory", "reason": "too large", "peak_bytes": 2**30}
    speed = SPEEDS[method] * batch
    spread = {"low": speed, "median": speed, "high": speed}
    return {"status": "measured", "peak_bytes": batch * 2**20, "tokens_per_second": spread, "step_ms": spread}


def run(path: Path, *argv: str, points=invented_point) -> tuple[int, dict, str]:
    output = path / "throughput.json"
    status = throughput.main(["--batches", "1", "2", "4", "--output", str(output), *argv], points)
    return status, json.loads(output.read_text()), output.with_suffix(".md").read_text()


def test_ratios_stand_beside_the_papers(tmp_path: Path) -> None:
    status, record, table = run(tmp_path, "--methods", *SPEEDS)
    assert status == 0
    info = record["train_info"]
    assert info["adacc_over"]["full"] == {"1": 1.2, "2": 1.2, "4": 1.2}
    assert info["paper"] == {"full": [1.01, 1.37], "quantization": [1.09, 1.28]}
    assert "HF gradient checkpointing: 1.20 to 1.20 (paper, on V100 GPUs: 1.01 to 1.37)" in table
    assert len(info["points"]) == 12


def test_a_red_gate_is_the_exit_status(tmp_path: Path) -> None:
    def red(function, order: dict, timeout_s: float) -> dict:
        return {"status": "red", "reason": "wrong gradients"}

    status, record, table = run(tmp_path, "--methods", "adacc", points=red)
    assert status == 1
    assert "adacc, batch 1: wrong gradients" in table
    assert record["train_info"]["adacc_over"] == {}


def test_a_tiny_model_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset", "demo", "--tokens", "32", "--batches", "1", "--methods", "none", "full", "--rounds", "1"]
    assert throughput.main([*argv, "--clock", "cpu", "--output", str(tmp_path / "t.json")], run_here) == 0
    record = json.loads((tmp_path / "t.json").read_text())
    assert {point["status"] for point in record["train_info"]["points"].values()} == {"measured"}
    assert record["run_info"]["limit_bytes"] == 256 * 2**20
    assert "saved as" in capsys.readouterr().out
