"""The report on predictions, from invented figures and from one real prediction."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from adacc_hf.cli import main as cli
from adacc_hf.estimate.plan_report import ASSUMPTIONS, CONTEXT_BYTES, MEASURED_SHARE
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository.predictions import GOAL_WITHIN, errors, main
from adacc_hf.eval.repository.published.measurements import (
    held_out,
    held_out_pairs,
    model_config,
    pairs,
    rows,
    second_looks,
)
from adacc_hf.eval.repository.published.prediction import predict

RESULTS = Path(__file__).resolve().parents[3] / "eval" / "results" / "cpu"


def figures(row, changes=None, factor=1.08):
    """Return a prediction that is 8 % too high at first, and correct with the source's known changes applied."""
    is_second = any(look.is_for(row) for look in second_looks()) and changes
    nbytes = row.measured_bytes * (1.0 if is_second else factor) - row.context_bytes
    return {
        "status": "measured",
        "predicted_bytes": round(nbytes),
        "moment": "head and loss",
        "head": row.head,
        "stored_bytes": 1,
        "static": {"parameters_bytes": 1},
        "step_ms": 10.0,
        "cpu_seconds": 1.0,
    }


def ratios(pair):
    """Return a prediction that is 2 points too high."""
    return {"status": "measured", "ratio": pair.measured + 0.02, "tokens_per_ms": [1.0, 1.0], "cpu_seconds": 1.0}


@pytest.fixture
def printed(tmp_path, capsys):
    """Return `printed(*options)`, which returns the runner's output and its record."""
    pytest.importorskip("matplotlib")

    def run(*options, predicted=figures, compared=ratios, status=0):
        output = tmp_path / "published.json"
        assert main(["--output", str(output), *options], predicted, compared) == status
        return capsys.readouterr().out, json.loads(output.read_text()), output

    return run


def cells(text, first):
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_plan_says_how_far_the_committed_predictions_were_off():
    """The sentence of `adacc plan` equals the error in the record of the first evaluation."""
    absolute_errors = [abs(error.value) for error in errors(Ledger.load(RESULTS / "published.json"), second=False)]
    within, median = sum(value <= GOAL_WITHIN for value in absolute_errors), 100 * statistics.median(absolute_errors)
    sentence = f"For {len(absolute_errors)} published memory measurements, {within} predictions were within 10 %, "
    sentence += f"and the median error was {median:.1f} %"
    assert any(text.startswith(sentence) for text in ASSUMPTIONS)


def test_the_range_of_a_plan_holds_eight_of_ten_measurements():
    """`adacc plan` widens its peak by the 10th and 90th percentile of measured over predicted, and by the context."""
    shares = [1 / (1 + error.value) for error in errors(Ledger.load(RESULTS / "published.json"), second=False)]
    deciles = statistics.quantiles(shares, n=10, method="inclusive")
    assert (math.floor(100 * deciles[0]) / 100, math.ceil(100 * deciles[-1]) / 100) == MEASURED_SHARE
    assert max(row.context_bytes for row in rows().values()) == CONTEXT_BYTES


@pytest.mark.nightly
def test_rows_groups_and_speeds_are_told(printed):
    text, record, output = printed()
    check_record(record)
    assert output.with_suffix(".svg").is_file()
    num_rows = sum(row.set_aside is None for row in rows().values())
    line = cells(text, "all")
    assert line[1:4] == [str(num_rows), "8.0", f"{num_rows} of {num_rows}"]
    assert cells(text, "litgpt phi-1.5 batch 1")[6:8] == ["+8.0", "+0.0"]
    num_pairs = sum(pair.set_aside is None for pair in pairs().values())
    speeds = text.partition("Times of two modes")[2]
    assert cells(speeds, "all")[1:] == [str(num_pairs), "2.0", f"{num_pairs} of {num_pairs}", "2.0"]
    measured_ratio = 2162 / 1914
    expected = [f"{measured_ratio:.3f}", f"{measured_ratio + 0.02:.3f}", "+2.0", ""]
    assert cells(speeds, "torchtitan 13B, every second block")[3:] == expected


@pytest.mark.nightly
def test_the_held_out_half_is_not_predicted_while_mending(printed):
    row_names = []

    def watched(row, *changes):
        row_names.append(row.name)
        return figures(row, *changes)

    pair_names = []

    def watched_pair(pair):
        pair_names.append(pair.name)
        return ratios(pair)

    text, record, _ = printed("--half", "open", predicted=watched, compared=watched_pair)
    assert not held_out(rows()).intersection(row_names)
    assert not held_out_pairs().intersection(pair_names)
    assert not any(line.startswith("| held-out half") for line in text.splitlines())
    assert set(row_names) == set(record["run_info"]["rows"])
    assert pair_names == record["run_info"]["speeds"]


def test_a_row_that_fails_is_told_and_others_go_on(printed):
    def failing(row, *changes):
        if row.name == "forum GPT-2":
            raise ValueError("no such thing")
        return figures(row, *changes)

    text, record, _ = printed("--rows", "forum GPT-2", "torchtune 3B packed", "--speeds", predicted=failing, status=1)
    check_record(record)
    assert cells(text, "forum GPT-2")[5] == "ValueError: no such thing"
    assert cells(text, "torchtune 3B packed")[6] == "+8.0"


@pytest.mark.parametrize(("checkpointing", "method"), [("none", "plain"), ("full", "full recomputation")])
def test_a_prediction_is_what_the_command_says(checkpointing, method, tmp_path, capsys):
    changes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    row = replace(rows()["forum GPT-2"], length=64, batch=2, checkpointing=checkpointing)
    model_config(row.model, changes).save_pretrained(tmp_path)
    options = ["--batch-size", "2", "--seq-len", "64", "--dtype", "fp32", "--device", row.device]
    assert cli(["plan", "--model", str(tmp_path), *options, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["methods"][method]
    prediction = predict(row, changes)
    assert prediction["predicted_bytes"] == reported["peak_bytes"]
    assert prediction["step_ms"] == pytest.approx(reported["step_ms"])
