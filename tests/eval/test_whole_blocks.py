"""The benchmark of blocks that replay serves badly, at a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import whole_blocks
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.whole_blocks import CASES, HALF, LEAST, Scale

TINY = Scale(width=32, layers=4, batch=2, tokens=64)


@pytest.mark.parametrize("name", CASES)
def test_half_of_the_room_is_used_and_kept_to(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "whole_blocks.json"
    arguments = ["--rounds", "1", "--clock", "cpu", "--output", str(output)]
    assert whole_blocks.main(arguments, {name: CASES[name]}, TINY) == 0
    record = json.loads(output.read_text())
    check_record(record)
    point = record["train_info"]["points"][name]
    plain, checkpointed, half, least = point["methods"].values()
    assert not any(row["gradient_error"] for row in point["methods"].values())
    assert least["peak_bytes"] <= checkpointed["peak_bytes"]
    if "experts" in name:
        assert set(half["blocks"]) == {"plain", "checkpoint"}
        assert half["peak_bytes"] <= point["budget"]
    else:
        assert half["blocks"] == {"replay": TINY.layers}
        assert half["stored_bytes"] <= point["budget"] * plain["stored_bytes"]
    printed = capsys.readouterr().out
    assert HALF in printed
    assert LEAST in printed
