"""The table of what each part is worth, from points that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import ablation
from adacc_hf.eval.trials.training import train_curve


def made_up(function, order: dict, timeout_s: float) -> dict:
    if order["method"] == "no_recomputation" and function is not train_curve:
        return {"status": "out_of_memory", "reason": "no policy fits"}
    if function is train_curve:
        last = 3.0 if order["method"] == "none" else 3.03
        return {"status": "measured", "curve": [(1, 4.0), (2, last)]}
    spread = {"low": 9.0, "median": 10.0, "high": 11.0}
    gate = {"gradient_error": 0.125}
    return {"status": "measured", "peak_bytes": 2**20, "step_ms": spread, "tokens_per_second": spread, "gate": gate}


def test_every_variant_has_a_row(tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    assert ablation.main(["--output", str(output)], made_up) == 0
    record = json.loads(output.read_text())
    assert "no_recomputation, loss" not in record["train_info"]["points"]  # nothing to train within the budget
    assert len(record["train_info"]["points"]) == 13
    lines = {
        line.split("|")[1].strip(): line for line in output.with_suffix(".md").read_text().splitlines() if "|" in line
    }
    cells = [cell.strip() for cell in lines["Adacc with one policy for all layers"].split("|")[2:-1]]
    assert cells == ["10.0 (9.0 to 11.0)", "1.00 MiB", "0.1250", "3.0300", "+1.000 %"]
    assert "out of memory" in lines["Adacc without recomputation"]


def test_budgets_reach_only_who_heeds_them(tmp_path: Path) -> None:
    budgets = {}

    def noting(function, order: dict, timeout_s: float) -> dict:
        if function is not train_curve:
            budgets[order["method"]] = order["budget"]
        return made_up(function, order, timeout_s)

    ablation.main(["--budget", "0.3", "--output", str(tmp_path / "a.json")], noting)
    assert budgets["none"] is budgets["full"] is None
    assert budgets["adacc"] == budgets["one_policy"] == 0.3


def test_an_absolute_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--budget=1GiB must be a fraction"):
        ablation.main(["--budget", "1GiB", "--output", str(tmp_path / "a.json")], made_up)
