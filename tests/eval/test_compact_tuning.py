"""Fine-tuning by CompAct and others, from figures that are made up and from a model that barely trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval import compact_tuning
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials import low_rank_tuning
from adacc_hf.eval.trials.isolation import run_here
from adacc_hf.eval.trials.low_rank_tuning import PACKAGES, START, WORDS, Passages, words_of


def made_up(function, order: dict, timeout_s: float | None) -> dict:
    if function is low_rank_tuning.pretrain:
        return {"status": "measured", "accuracy": 0.75}
    if order["method"] == "galore":
        return {"status": "cannot_run", "reason": "galore_torch is not installed"}
    spread = {"low": 9.0, "median": 10.0 + order["seed"], "high": 12.0}
    # The middle one of three rates is the best.
    worse = 0.0 if order["rate"] == low_rank_tuning.TUNINGS[order["method"]][0].rate else 0.125
    accuracy = 0.5 + 0.25 * order["seed"] - worse
    return {
        "status": "measured", "accuracy": accuracy, "trained": 1234, "peak_bytes": 2**20, "step_ms": spread,
        "training_loss": 1.0,
    }  # fmt: skip


def run(path: Path, *argv: str, points=made_up) -> tuple[int, dict, str]:
    output = path / "compact_tuning.json"
    status = compact_tuning.main(["--output", str(output), *argv], points)
    return status, json.loads(output.read_text()), output.with_suffix(".md").read_text()


def test_the_table_by_hand(tmp_path: Path) -> None:
    status, record, report = run(tmp_path, "--rates", "0.3", "1", "3", "--methods", "full", "galore")
    assert status == 0
    check_record(record)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "| " in line]
    assert ["AdamW", "0.001", "0.500", "0.750", "0.625", "0.500, 0.500", "1,234", "1.00 MiB", "10 and 11"] in rows
    assert ["GaLore r = 4", "", "cannot run", "cannot run", "", "", "", "", ""] in rows
    assert report.count("galore_torch is not installed") == 1


def test_passages_are_of_their_packages_and_held_out_ones_of_none_that_is_trained_on() -> None:
    train, held_out = (Passages(PACKAGES, 32, 60, 0, is_held_out) for is_held_out in (False, True))
    assert [int(row["labels"]) for row in (train[place] for place in range(7))] == [0, 1, 2, 3, 4, 5, 0]
    for label, package in enumerate(PACKAGES):
        words = words_of(package)
        split = int(0.75 * len(words))
        for data, part in ((train, words[:split]), (held_out, words[split:])):
            start, *passage = data[label]["input_ids"].tolist()
            assert start == START
            assert len(passage) == 31
            assert passage in part.unfold(0, 31, 1).tolist()


def test_words_are_told_apart_and_equal_ones_are_not() -> None:
    words = words_of("json")
    assert 0 <= int(words.min()) < int(words.max()) < WORDS
    # Of the library's smallest package; its source has some 600 different words and signs.
    assert 300 < len(words.unique()) < 2000


# GaLore's own, where it is installed; and PEFT 0.21 with Transformers 5.23.
@pytest.mark.filterwarnings(
    "ignore:This implementation of AdamW is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
def test_a_model_is_tuned_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained and what it takes differ; LoRA and CompAct leave most weights without a gradient."""
    monkeypatch.setattr(low_rank_tuning, "MEASURED_STEP", 2)
    steps = ("--steps", "3", "--pretraining-steps", "2", "--seeds", "1", "--rates", "1")
    status, record, _ = run(tmp_path, *steps, points=run_here)
    assert status == 0
    check_record(record)
    points = {name: p for name, p in record["train_info"]["points"].items() if "peak_bytes" in p}
    peaks = {name.partition(",")[0]: point["peak_bytes"] for name, point in points.items()}
    assert peaks["compact_r4"] < peaks["compact_r8"] < peaks["full"]
    assert peaks["lora"] < peaks["full"]
    trained = {name.partition(",")[0]: point["trained"] for name, point in points.items()}
    assert trained["lora"] < trained["compact_r4"] < trained["compact_r8"] < trained["full"]
