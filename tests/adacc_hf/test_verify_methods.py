"""`adacc verify --methods`: silent differences and errors of other methods are found, and Adacc is exact."""

import json
import re

import pytest

from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.verify_cases import CASES
from adacc_hf.verify_methods import METHODS, cell, compared, report_text, run_methods, train

CELLS = {
    "dropout": ["exact", "off", "exact"],
    "in-place counter": ["off", "off", "exact"],
    "BatchNorm": ["state off", "error", "exact"],
}
"""Results of gradient checkpointing, torch's memory budget and Adacc. The budget redraws dropout."""


def test_three_cases_under_three_methods(one_thread, tmp_path, capsys):
    path = tmp_path / "record.json"
    assert run_methods(["checkpointing", "torch-budget", "adacc"], path, list(CELLS))
    out = capsys.readouterr().out
    rows = dict(re.findall(r"^  (dropout|in-place counter|BatchNorm)  +(.*)$", out, re.MULTILINE))
    cells = {name: re.split(r"  +", row) for name, row in rows.items()}
    assert {name: [re.sub(r"^[\d.e-]+ ", "", each) for each in row] for name, row in cells.items()} == CELLS
    assert float(cells["dropout"][1].split()[0]) > 0.1
    assert "BatchNorm: torch-budget: RuntimeError: view size" in out
    last = "Exact in 3 cases: checkpointing 1, torch-budget 0, adacc 3."
    assert " ".join(out.split()).endswith(last)
    record = json.loads(path.read_text())
    check_record(record)
    text = report_text(record["train_info"]["points"])
    assert "[pytorch/pytorch#190758](https://github.com/pytorch/pytorch/issues/190758)" in text
    assert last in text


def test_a_difference_of_adacc_is_a_failure(one_thread, monkeypatch, capsys):
    """Adacc is replaced by checkpointing, which is wrong here, as if replay were."""
    monkeypatch.setitem(METHODS, "adacc", METHODS["checkpointing"])
    assert not run_methods(["adacc"], None, ["own generator"])
    assert "Exact in 1 cases: adacc 0." in capsys.readouterr().out


def test_a_case_without_exact_recomputation_gets_plain_memory(one_thread):
    """Blocks that draw from a generator of their own are not recomputed."""
    with pytest.raises(InfeasibleBudgetError):
        train(CASES["own generator"], METHODS["adacc"])
    point = compared(CASES["own generator"], "adacc", train(CASES["own generator"], METHODS["plain"]))
    assert cell(point) == "exact"
