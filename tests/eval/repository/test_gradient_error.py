"""The gradient-error table of a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.eval.repository import codecs, gradient_error
from adacc_hf.eval.repository.codec_schemes import LAYER_SPECIFIC, Scheme
from adacc_hf.eval.trials.workload import Workload

CHOSEN = [
    Scheme(name="int8", group_size=64, rounding="nearest"),
    Scheme(name="token_int4", scale="paper", rounding="nearest"),
    Scheme(name="token_int4", scale="signed", rounding="nearest"),
]
LAYERED = [Scheme(name=LAYER_SPECIFIC, scale="signed", group_size=64, rounding="nearest")]


@pytest.fixture
def _few_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the schemes to one of each kind that the table shows, because a hundred schemes take a minute."""
    monkeypatch.setattr(gradient_error, "codec_schemes", lambda: CHOSEN)
    monkeypatch.setattr(gradient_error, "layer_specific_schemes", lambda: LAYERED)


@pytest.mark.usefixtures("_few_schemes")
def test_record_and_tables(tiny: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "errors.json"
    argv = ["--only", "gradient", "--steps", "2", "--batches", "2", "--output", str(output)]
    assert codecs.main(argv, replace(tiny, attention="eager")) == 0
    record = json.loads(output.read_text())
    assert (record["run_info"]["steps"], record["run_info"]["batches"]) == (2, 2)
    training, *rows = record["train_info"]["points"].values()
    errors = {(row["name"], row["scale"]): row["error"] for row in rows}
    assert list(rows[0]) == ["name", "scale", "group_size", "rounding", "error", "round_trip_error"]
    assert 0 < errors["int8", None] < errors["token_int4", "signed"] < training["another_batch"]
    assert 0 < errors[LAYER_SPECIFIC, "signed"] < training["another_batch"]
    trips = {(row["name"], row["scale"]): row["round_trip_error"] for row in rows}
    assert 0 < trips["int8", None] < trips["token_int4", "signed"] < trips["token_int4", "paper"] < 1
    assert trips[LAYER_SPECIFIC, "signed"] is None
    printed = capsys.readouterr().out
    assert f"{errors['token_int4', 'paper']:.3f} |" in printed
    assert f"another batch: {training['another_batch']:.2f}" in printed


def test_training_lowers_the_loss(tiny: Workload, tmp_path: Path) -> None:
    settings = gradient_error.Settings(runner="x", output=tmp_path / "x.json")
    # A new model has a loss of ln 256 = 5.5, and 20 steps at this size bring it well below 5.
    assert gradient_error.train(tiny, tiny.batches(), 20, settings)[1] < 5.0


def test_table_puts_group_sizes_side_by_side() -> None:
    errors = {
        Scheme(name="int8", group_size=16, rounding="nearest"): 0.1,
        Scheme(name="int8", group_size=128, rounding="nearest"): 0.2,
        Scheme(name="token_int4", scale="paper", rounding="nearest"): 0.3,
    }
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in gradient_error.table_text(errors).splitlines()
    ]
    assert lines[2] == ["int8", "", "nearest", "", "0.100", "", "", "0.200"]
    assert lines[3] == ["token_int4", "paper", "nearest", "0.300", "", "", "", ""]


def test_root_mean_square() -> None:
    assert gradient_error.root_mean_square([3.0, 4.0, 5.0, 0.0]) == 50**0.5 / 2
