"""JSON and Markdown records of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adacc_hf.reports import run_record
from adacc_hf.reports.run_record import Settings, Spread, make_record, markdown_table, meta_info, to_json


def test_spread_is_of_percentiles() -> None:
    assert Spread.of([float(value) for value in range(11)]) == Spread(low=2.0, median=5.0, high=8.0)
    assert Spread.of([3.0]) == Spread(low=3.0, median=3.0, high=3.0)


def test_record_has_the_three_parts() -> None:
    settings = Settings(runner="bench", seed=7, notes="busy", output=Path("bench.json"))
    record = make_record(settings, {"rounds": 3}, {"step_ms": Spread.of([1.0])}, "complete")
    assert record["run_info"] == {"runner": "bench", "rounds": 3, "seed": 7, "threads": 1, "device": "cpu"}
    assert record["train_info"] == {"step_ms": {"low": 1.0, "median": 1.0, "high": 1.0}}
    meta = record["meta_info"]
    assert (meta["status"], meta["seeds"], meta["notes"]) == ("complete", [7], "busy")
    assert meta["versions"]["torch"] == torch.__version__
    assert set(meta) == {"status", "date", "commit", "uncommitted_changes", "device", "seeds", "versions", "notes"}


def test_record_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    meta = meta_info(Settings(runner="bench", output=tmp_path / "bench.json"))
    assert (meta["commit"], meta["uncommitted_changes"]) == (None, None)


def test_to_json_goes_all_the_way_down() -> None:
    one = Spread.of([1.0])
    plain = {"low": 1.0, "median": 1.0, "high": 1.0}
    assert to_json({"a": [one], "b": {"c": one}, "d": 1}) == {"a": [plain], "b": {"c": plain}, "d": 1}


def test_markdown_table_is_aligned() -> None:
    rows = [{"method": "plain", "ms": "1.0"}, {"method": "x", "ms": "10.25"}]
    assert markdown_table(rows).splitlines() == [
        "| method |    ms |",
        "| ------ | ----: |",
        "| plain  |   1.0 |",
        "| x      | 10.25 |",
    ]
