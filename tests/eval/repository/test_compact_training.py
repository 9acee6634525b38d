"""Validation losses of low-rank optimizers, from invented curves and from a model that barely trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository import compact_training, low_rank
from adacc_hf.eval.trials.isolation import CannotRunError, run_here

LAST = {"plain": 2.0, "compact_4": 1.9}


def invented_point(function, order: dict, timeout_s: float | None) -> dict:
    if order["method"] not in LAST:
        return {"status": "cannot_run", "reason": "it is not installed"}
    # The middle one of three learning rates is the best.
    worse = 0.0 if order["rate"] == low_rank.METHODS[order["method"]].rate else 0.5
    curve = [(1, 3.0), (2, LAST[order["method"]] + 0.1 * order["seed"] + worse)]
    return {"status": "measured", "curve": curve, "peak_bytes": 2**20, "parameters": 1_900_000}


def run(path: Path, *argv: str, points=invented_point) -> tuple[int, dict, str]:
    output = path / "compact_training.json"
    status = compact_training.main(["--output", str(output), *argv], points)
    return status, json.loads(output.read_text()), output.with_suffix(".md").read_text()


def test_the_table_by_hand(tmp_path: Path) -> None:
    status, record, report = run(tmp_path, "--rates", "0.3", "1", "3", "--methods", "plain", "galore", "compact_4")
    assert status == 0
    check_record(record)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "| " in line]
    assert ["AdamW", "0.003", "2.0000", "2.1000", "2.0500", "+0.0000", "2.5500, 2.5500", "1.00 MiB"] in rows
    assert ["CompAct n/4", "0.01", "1.9000", "2.0000", "1.9500", "-0.1000", "2.4500, 2.4500", "1.00 MiB"] in rows
    assert ["GaLore n/4", "", "cannot run", "cannot run", "", "", "", ""] in rows
    assert report.count("it is not installed") == 1
    assert ">CompAct n/4<" in (tmp_path / "compact_training.svg").read_text()


def test_a_training_that_failed_is_the_exit_status(tmp_path: Path) -> None:
    def failing(function, order: dict, timeout_s: float | None) -> dict:
        return {"status": "error", "reason": "broken"}

    status, _, report = run(tmp_path, "--methods", "plain", points=failing)
    assert status == 1
    assert "AdamW: broken" in report


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "missing_package", lambda name: f"{name} is not installed")
    with pytest.raises(CannotRunError, match="apollo_torch is not installed"):
        low_rank.METHODS["apollo"].check()
    low_rank.METHODS["compact_4"].check()


# The packages of GaLore and APOLLO, where they are installed.
@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
def test_methods_train_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_training, "MEASURED_STEP", 5)
    status, record, _ = run(tmp_path, "--steps", "6", "--seeds", "1", "--rates", "1", points=run_here)
    assert status == 0
    check_record(record)
    points = {name: p for name, p in record["train_info"]["points"].items() if p["status"] == "measured"}
    # An untrained model of bytes has a loss of ln 256 = 5.55.
    assert all(len(point["curve"]) == 1 and 2.0 < point["curve"][0][1] < 5.5 for point in points.values())
    peaks = {name.partition(",")[0]: point["peak_bytes"] for name, point in points.items()}
    assert peaks["compact_4_adacc"] < peaks["compact_4"] < peaks["compact_2"] < peaks["plain"]
