"""The sweep over budgets on a tiny model, and that it notices what it promises not to happen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import budget_sweep
from adacc_hf.eval.budget_sweep import find_faults
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials.families import Size

TINY = Size(width=64, layers=3, heads=2, batch=4, tokens=128)


def test_promises_hold_on_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "budget_sweep.json"
    options = ["--family", "gpt2", "--attention", "eager", "--budgets", "6", "--output", str(output)]
    assert budget_sweep.main(options, TINY) == 0
    record = json.loads(output.read_text())
    check_record(record)
    rows = record["train_info"]["points"]["gpt2, eager"]["budgets"]
    assert len(rows) == 6
    assert rows[-1]["overhead_ms"] == 0.0 < rows[0]["overhead_ms"]
    assert record["train_info"]["faults"] == []
    assert "one plan for all" in output.with_suffix(".svg").read_text()
    assert "Overhead never rises" in capsys.readouterr().out


def row(budget: int, **figures: float) -> dict[str, float | None]:
    return {
        "budget_bytes": budget,
        "measured_bytes": budget,
        "overhead_ms": 1.0,
        "one_plan_ms": 1.0,
        "greedy_ms": None,
        **figures,
    }


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ({"overhead_ms": 2.0, "one_plan_ms": 2.0}, "the overhead is 2.0 ms, more than 1.0 ms at 10 bytes"),
        ({"measured_bytes": 21}, "the peak measured is 21 bytes"),
        ({"one_plan_ms": 0.5}, "one plan for all costs 0.5 ms, less than 1.0 ms"),
        ({"greedy_ms": 0.5}, "the greedy rule costs 0.5 ms, less than 1.0 ms"),
    ],
)
def test_a_broken_promise_is_named(figures: dict[str, float], fault: str) -> None:
    assert find_faults([row(10), row(20)], "cpu") == []
    (found,) = find_faults([row(10), row(20, **figures)], "cpu")
    assert fault in found


def test_one_budget_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--budgets=1 must be 2 or more"):
        budget_sweep.main(["--budgets", "1", "--output", str(tmp_path / "x.json")])
