"""Table 1 of a tiny model: its activations, and the winner of each row by the row's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository import table1
from adacc_hf.eval.trials.workload import Workload

# Activations of 64 KiB and more are compressed.
SMALL = Workload(width=64, layers=2, batch=2, tokens=128)


def test_record_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table1.json"
    assert table1.main(["--attention", "eager", "--output", str(output)], SMALL) == 0
    record = json.loads(output.read_text())
    check_record(record)
    ((name, point),) = record["train_info"]["points"].items()
    assert "eager" in name
    rows = point["activations"]
    assert {row["codec"] for row in rows} >= {"bitmask", "outlier_int4", "asymmetric_int4"}
    assert [row["nbytes"] for row in rows] == sorted((row["nbytes"] for row in rows), reverse=True)
    for row in rows:
        bands = {"recompute": row["recompute_band"], "compress": row["compress_band"]}
        measured_bands = {name: band for name, band in bands.items() if band is not None}
        assert row["winner"] == max(measured_bands, key=measured_bands.__getitem__, default="retain")
        if row["codec"] is not None:
            freed = row["nbytes"] - row["payload_bytes"]
            assert row["compress_band"] == pytest.approx(freed / row["compress_ms"])
    printed = capsys.readouterr().out
    assert "| attn:softmax" in printed
    assert "| T4" in printed
