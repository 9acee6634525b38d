"""The share of what can be won by the roofline, on the smallest of models."""

from __future__ import annotations

import pytest

from adacc_hf.estimate.devices import find_device
from adacc_hf.eval import roofline
from adacc_hf.eval.records.records import share_of_what_can_be_won


@pytest.mark.parametrize(("ours", "share"), [(3.0, 1.0), (4.0, 0.0), (3.25, 0.75), (2.0, 2.0), (5.0, -1.0)])
def test_the_share_is_of_the_time_between_checkpointing_and_plain(ours: float, share: float) -> None:
    assert share_of_what_can_be_won(4.0, 3.0, ours) == share


def test_where_checkpointing_is_no_slower_there_is_nothing_to_win() -> None:
    assert share_of_what_can_be_won(3.0, 3.0, 2.0) is None


def test_given_rates_stand_in_place_of_the_data_sheets() -> None:
    """Fused attention keeps the rate that was measured of it."""
    sheet = find_device("h100")
    assert roofline.with_rates(sheet, None, None) == sheet
    device = roofline.with_rates(sheet, 2.65, 600)
    assert device.bandwidth_bytes == 2.65e12
    assert device.flops == sheet.flops | {"bfloat16": 600e12, "float16": 600e12}
    assert device.attention_share * 600e12 == pytest.approx(sheet.attention_share * sheet.flops["bfloat16"])


@pytest.mark.usefixtures("offline")
def test_a_table_for_a_small_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(roofline, "CASES", {"demo": (8, 256)})
    assert roofline.main(["--device", "h100", "--models", "demo"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| demo")]
    methods = [line.split("|")[2].strip() for line in lines]
    assert methods[:4] == ["plain", "checkpointing", "Adacc at half of plain's bytes", "Adacc at checkpointing's peak"]
    cells = {line.split("|")[2].strip(): [cell.strip() for cell in line.split("|")] for line in lines}
    assert cells["plain"][-2] == "100.0%"
    assert cells["checkpointing"][-3:-1] == ["1.000 x", "0.0%"]
