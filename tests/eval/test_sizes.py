"""Memory at sizes never profiled, of a model so small that nothing but the bytes can be said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import sizes
from adacc_hf.eval.records.records import Settings
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials.length_cases import Scale

TINY = Scale(width=32, layers=2, heads=2, batch=3, shortest=16, longest=48, steps=20)


def test_a_run_is_a_record_with_tables_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "sizes.json"
    status = sizes.main(["--cases", "gpt2", "--sizes", "2", "--output", str(output)], TINY)
    record = json.loads(output.read_text())
    check_record(record)
    point = record["train_info"]["points"]["gpt2"]
    # What records of a block take is much of the memory of so small a model: a budget is not kept at each step.
    faults = record["train_info"]["faults"]
    assert status == bool(faults)
    assert all(" and nothing was said" in fault for fault in faults)
    assert len(point["told"]) == 2
    assert len(point["training"]["peaks"]) == point["training"]["steps"] == TINY.steps
    assert max(point["training"]["peaks"]) > point["training"]["budget_bytes"]
    too_large = point["training"]["over"][-1]
    assert (too_large["said"], too_large["size"]) == (True, [3, 96])  # the batch that nothing has room for
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert output.with_suffix(".svg").read_text().startswith("<?xml")


def test_what_is_not_kept_is_a_fault() -> None:
    told = {
        "size": [3, 40],
        "predicted_stored_bytes": 100,
        "measured_stored_bytes": 100,
        "predicted_peak_bytes": 1000,
        "measured_peak_bytes": 1029,
    }
    over = {"step": 7, "size": [3, 48], "peak_bytes": 11, "said": True}
    settings = Settings(runner="sizes", output=Path("sizes.json"))
    point = {"told": [told], "training": {"over": [over]}}
    assert sizes.faults_of(point, settings) == []
    point = {
        "told": [told | {"measured_stored_bytes": 101}, told | {"measured_peak_bytes": 969}],
        "training": {"over": [over | {"said": False}]},
    }
    faults = sizes.faults_of(point, settings)
    assert [fault.split()[0] for fault in faults] == ["at", "at", "step"]
