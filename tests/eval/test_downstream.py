"""`adacc eval downstream`: its record, limits and second start, and a model that Adacc trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from adacc_hf.cli import main
from adacc_hf.eval.downstream import weights_digest
from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks
from adacc_hf.eval.tasks.zero_shot import load_model, score


@pytest.fixture
def command(checkpoint: Path, data_dir: Path, tmp_path: Path) -> list[str]:
    options = {"model": checkpoint, "data_dir": data_dir, "output": tmp_path / "out" / "downstream.json"}
    return ["eval", "downstream", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def record(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "downstream.json").read_text())


def scores(model: Any, data_dir: Path) -> dict[str, dict[str, Any]]:
    return {name: score(model, task) for name, task in load_tasks(PAPER_TASKS, data_dir).items()}


def test_leaves_the_scores_of_every_task(command, checkpoint, data_dir, tmp_path, capsys):
    assert main(command) == 0
    record_of_run = record(tmp_path)
    expected = scores(load_model(str(checkpoint), "cpu", 8), data_dir)
    assert record_of_run["results"] == expected
    accuracies = [expected[name]["acc"] for name in PAPER_TASKS]
    assert record_of_run["train_info"]["average_acc"] == sum(accuracies) / 4
    assert all(0 <= acc <= 1 for acc in accuracies)
    assert (record_of_run["run_info"]["limit"], record_of_run["run_info"]["num_fewshot"]) == (None, 0)
    assert record_of_run["meta_info"]["status"] == "complete"
    printed = capsys.readouterr().out
    assert "swag, version 1" in printed
    assert "LIMITED" not in printed


def test_a_limited_run_says_so(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--tasks", "sciq", "--limit", "1"]) == 0
    record_of_run = record(tmp_path)
    assert record_of_run["run_info"]["limit"] == 1
    counts = record_of_run["results"]["sciq"]
    assert (counts["num_samples"], counts["num_samples_original"]) == (1, 2)
    printed = capsys.readouterr().out
    assert "LIMITED to the first 1 rows of each task" in printed
    assert "1 of 2" in printed


def test_other_rows_are_scored_anew(command: list[str], data_dir: Path, tmp_path: Path) -> None:
    command += ["--tasks", "lambada_openai,sciq"]
    assert main(command) == 0
    before = record(tmp_path)["run_info"]["tasks"]
    (data_dir / "lambada_openai" / "test.jsonl").write_text(json.dumps({"text": "Some other words"}) + "\n")
    assert main([*command, "--resume"]) == 2
    assert main(command) == 0
    after = record(tmp_path)["run_info"]["tasks"]
    assert [before[name] == after[name] for name in ("lambada_openai", "sciq")] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "mmlu"], "--tasks=mmlu is unknown"),
        (["--model", "no-such/model"], "no-such/model"),
        (["--data_dir", "nowhere"], "--data_dir=nowhere has neither"),
    ],
    ids=["task", "model", "data"],
)
def test_a_wrong_setting_is_one_line(options, message, command, capsys):
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("adacc eval: error: ")
    assert message in error


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "training_args.bin", "trainer_state.json"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_digest_changes_with_the_model(name: str, weights: Path) -> None:
    digest_before = weights_digest(weights)
    (weights / name).write_bytes(b"other")
    assert weights_digest(weights) != digest_before
