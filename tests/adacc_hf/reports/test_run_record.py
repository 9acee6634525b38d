"""JSON and Markdown records of measurements."""

from __future__ import annotations

from pathlib import Path

import torch

from adacc_hf.reports.run_record import Settings, Spread, make_record, markdown_table


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


def test_markdown_table_is_aligned() -> None:
    rows = [{"method": "plain", "ms": "1.0"}, {"method": "x", "ms": "10.25"}]
    assert markdown_table(rows).splitlines() == [
        "| method |    ms |",
        "| ------ | ----: |",
        "| plain  |   1.0 |",
        "| x      | 10.25 |",
    ]
