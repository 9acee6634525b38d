"""Memory and times of CompAct and other optimizers, from invented figures and from a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository import compact, low_rank
from adacc_hf.eval.repository.low_rank import ADACC, LlamaShape
from adacc_hf.eval.trials.isolation import run_here

TINY = LlamaShape(width=64, inner=128, layers=2, heads=2, vocabulary=256, batch=2, tokens=64)
SPREAD = {"low": 90.0, "median": 100.0, "high": 120.0}


def invented_point(function, order: dict, timeout_s: float | None) -> dict:
    """Return peaks of 100 MiB and more, without GaLore."""
    if function is low_rank.time_steps:
        row = {"step_ms": SPREAD, "of_plain": 1.0, "of_plain_by_round": SPREAD, "peak_bytes": 2**20}
        galore = row | {"of_plain": 1.5, "drawing_ms": 20_100.0, "drawing_gap": 200}
        return {"status": "measured", "plain": row, "galore": galore}
    peaks = {method: 2**20 * (100 + 10 * place) for place, method in enumerate(order["methods"])}
    memory = {
        method: {"status": "measured", "static_bytes": 2**20, "peak_bytes": peak, "first_peak_bytes": peak}
        for method, peak in peaks.items()
    }
    memory["galore"] = {"status": "cannot_run", "reason": "galore_torch is not installed"}
    plan = {"shared_peak_bytes": 11 * 2**30, "peak_bytes": 12 * 2**30}
    return {"status": "measured", "memory": memory, "plans": dict.fromkeys(order["parts"], plan), "bf16_plan": plan}


def run(path: Path, *argv: str, points=invented_point) -> tuple[int, dict, str]:
    output = path / "compact.json"
    status = compact.main(["--output", str(output), *argv], points)
    return status, json.loads(output.read_text()), output.with_suffix(".md").read_text()


def cells(report: str, start: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.startswith(f"| {start} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_by_hand(tmp_path: Path) -> None:
    status, record, report = run(tmp_path, "--shapes", "60M", "1B")
    assert status == 0
    check_record(record)
    assert cells(report, "AdamW")[1:] == ["100.00 MiB (1.00 MiB)"] * 2
    assert cells(report, "GaLore n/4")[1:] == ["cannot run"] * 2
    assert "60M, GaLore n/4: galore_torch is not installed" in report
    assert cells(report, "60M, AdamW")[1:] == ["12.00", "11.59", "+3.5 %", "11.00"]
    assert cells(report, "1B, AdamW")[1:] == ["12.00", "above 81", "", "11.00"]
    assert cells(report, "1B, CompAct n/8")[1:] == ["12.00", "61.88", "-80.6 %", "11.00"]
    # 199 steps of 100 ms and one of 20,100 ms take as long as 200 steps of 200 ms, twice an ordinary step.
    times = next(line for line in report.splitlines() if line.startswith("| GaLore n/4") and "1.50 (" in line)
    assert times.split("|")[4].strip() == "3.00"
    assert ">AdamW with Adacc, at the peak of CompAct n/4<" in (tmp_path / "compact.svg").read_text()


def test_what_fails_is_said(tmp_path: Path) -> None:
    def failing(function, order: dict, timeout_s: float | None) -> dict:
        if function is low_rank.time_steps:
            return {"status": "error", "reason": "broken"}
        return invented_point(function, order, timeout_s)

    status, record, report = run(tmp_path, "--shapes", "60M", points=failing)
    assert status == 1
    check_record(record)
    assert "time: broken" in report


# GaLore's own package, where it is installed.
@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
def test_a_tiny_model_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CompAct needs less memory than AdamW. Adacc keeps to CompAct's peak, and Adacc with CompAct needs even less."""
    monkeypatch.setattr(compact, "SHAPES", {"60M": TINY})
    monkeypatch.setattr(compact, "CUTS", {"60M": (2, 2)})
    monkeypatch.setattr(compact, "TIMED_SHAPE", TINY)
    monkeypatch.setattr(compact, "PLANNED", ("plain", "compact_4"))
    status, record, report = run(tmp_path, "--shapes", "60M", "--rounds", "2", points=run_here)
    assert status == 0
    check_record(record)
    points = record["train_info"]["points"]
    memory = {name: point for name, point in points["60M"]["memory"].items() if point["status"] == "measured"}
    peaks = {name: point["peak_bytes"] for name, point in memory.items()}
    assert peaks["compact_4_adacc"] < peaks["compact_8"] < peaks["compact_4"] < peaks["compact_2"] < peaks["plain"]
    assert peaks[ADACC] <= peaks["compact_4"]
    assert memory["plain"]["static_bytes"] > memory["compact_2"]["static_bytes"]
    plans = points["60M"]["plans"]
    assert plans["compact_4"]["peak_bytes"] - plans["compact_4"]["shared_peak_bytes"] == 3 * 16 * 4 * 64 * 64 * 2
    assert plans["compact_4"]["peak_bytes"] < plans["plain"]["shared_peak_bytes"]
    assert points["time"]["compact_4"]["of_plain"] > 0
    assert "AdamW with Adacc" in report
