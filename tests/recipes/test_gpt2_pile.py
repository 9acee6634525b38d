import json
import subprocess
import sys
from pathlib import Path

import gpt2_pile
import pytest
from recipe_runs import assert_one_error, command_line, with_setting
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adacc_hf import Policy, Profile
from adacc_hf.artifacts.files import PROFILE_FILE

RECIPE = Path(gpt2_pile.__file__)
CHECKPOINT = "(a folder with a checkpoint)"
WITH_CALLBACK = ("quantization", "adacc", "adacc_no_outlier", "adacc_compact")


@pytest.mark.parametrize("method", ["none", "full", "compact", *WITH_CALLBACK])
def test_every_method_trains_and_leaves_its_results(
    method: str, tiny_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    metrics = gpt2_pile.main(with_setting(tiny_run, method=method, memory_budget="0.5", report=False))
    run = tmp_path / "run"
    assert 5.0 < metrics["eval_loss"] < 6.5  # ln 290 = 5.7 is chance level; after four steps the loss is still close
    assert metrics["steps"] == 4
    assert AutoModelForCausalLM.from_pretrained(run).config.vocab_size == len(AutoTokenizer.from_pretrained(run))
    assert json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    assert (run / "adacc_policy.json").is_file() == (method in WITH_CALLBACK)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f", {method}: 4 steps" in line]
    assert f"validation loss {metrics['eval_loss']:.3f}" in line


def test_quantization_compresses_and_adacc_keeps_to_its_budget(tiny_run: list[str], tmp_path: Path):
    stored_bytes = {}  # as a share of plain training's
    for method, budget in (("quantization", "1.0"), ("adacc", "0.5")):
        folder = tmp_path / method
        gpt2_pile.main(with_setting(tiny_run, method=method, memory_budget=budget, report=False, output_dir=folder))
        policy = Policy.load(folder / "adacc_policy.json")
        plain_bytes = Profile.load(folder / "adacc_profile.json").plain_stored_bytes
        stored_bytes[method] = policy.predicted_stored_bytes / plain_bytes
        if method == "quantization":
            assert {choice.codec for plan in policy.plans for _, choice in plan.choices} >= {"token_int4"}
            assert policy.action_counts()["recompute"] == 0
    assert stored_bytes["adacc"] <= 0.5
    assert stored_bytes["quantization"] < 1


def test_recomputing_gives_the_weights_of_plain_training(tiny_run: list[str], tmp_path: Path):
    weights = []
    for method in ("none", "full"):
        gpt2_pile.main(with_setting(tiny_run, method=method, output_dir=tmp_path / method))
        weights.append(load_file(tmp_path / method / "model.safetensors"))
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.parametrize("method", ["none", "adacc"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(method: str, tiny_run: list[str], tmp_path: Path):
    argv = with_setting(tiny_run, method=method, memory_budget="0.5", report=False, save_steps=3)
    uninterrupted = gpt2_pile.main(argv)
    resumed = gpt2_pile.main(
        with_setting(argv, output_dir=tmp_path / "resumed", resume_from_checkpoint=tmp_path / "run" / "checkpoint-3")
    )
    assert resumed["eval_loss"] == uninterrupted["eval_loss"]


def test_a_run_of_one_step_has_a_policy(tiny_run: list[str], tmp_path: Path):
    gpt2_pile.main(with_setting(tiny_run, method="adacc", memory_budget="0.5", max_steps=1))
    assert (tmp_path / "run" / "adacc_policy.json").is_file()
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_bfloat16_trains_on_the_cpu(tiny_run: list[str]):
    metrics = gpt2_pile.main(with_setting(tiny_run, method="adacc", memory_budget="0.5", report=False, bf16=True))
    assert 5.0 < metrics["eval_loss"] < 6.5


def test_the_pile_is_streamed(tiny_run: list[str], jsonl_file: Path, tmp_path: Path):
    hub = tmp_path / "hub"
    hub.mkdir()
    jsonl_file.rename(hub / "train.jsonl")
    argv = with_setting(tiny_run, dataset="pile", pile_id=hub, validation_documents=4, method="none")
    assert 5.0 < gpt2_pile.main(argv)["eval_loss"] < 6.5


def test_a_report_is_left_beside_the_policy(tiny_run: list[str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    gpt2_pile.main(with_setting(tiny_run, method="adacc", memory_budget="0.5"))
    for name in ("report.md", "report.html"):
        assert "recompute" in (tmp_path / "run" / name).read_text()


@pytest.mark.parametrize("has_profile", [True, False])
def test_a_resumed_run_reports_with_the_profile_of_its_checkpoint(
    has_profile: bool, tiny_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("matplotlib")
    checkpoint = tmp_path / "run" / "checkpoint-4"
    argv = with_setting(tiny_run, method="adacc", memory_budget="0.5")
    gpt2_pile.main(with_setting(argv, report=False))
    if not has_profile:
        (checkpoint / PROFILE_FILE).unlink()
    gpt2_pile.main(with_setting(argv, output_dir=tmp_path / "resumed", resume_from_checkpoint=checkpoint, max_steps=5))
    assert (tmp_path / "resumed" / "report.md").exists() == has_profile
    assert ("has a policy but no profile" in caplog.text) == (not has_profile)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dataset": "gone.jsonl"}, "--dataset=gone.jsonl: no such file"),
        ({"dataset": "pile", "pile_id": "no-such/pile"}, "no-such/pile"),
        ({"model": "no-such/model"}, "--model=no-such/model is not a preset (demo"),
        ({"tokenizer": "no-such/tokenizer"}, "--tokenizer=no-such/tokenizer could not be loaded"),
        ({"seq_len": 65}, "--seq_len=65 is outside its range (2 to 64"),
        ({"vocab_size": 100}, "--vocab_size=100 is below 257"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"memory_budget": "1.5"}, "memory_budget=1.5 is outside (0, 1]"),
        ({"validation_fraction": 2}, "--validation_fraction=2.0 must lie between 0 and 1"),
        ({"resume_from_checkpoint": "nowhere"}, "--resume_from_checkpoint=nowhere is not a checkpoint folder"),
        ({"method": "compare", "resume_from_checkpoint": CHECKPOINT}, "drop --resume_from_checkpoint"),
        ({"method": "compare", "max_steps": 2}, "--max_steps=2 leaves --method=compare no steps to measure"),
        ({"no_such_setting": 1}, "--no_such_setting"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_ends_with_one_message_and_status_2(setting, message, tiny_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "trainer_state.json").touch()
    argv = [str(tmp_path) if text == CHECKPOINT else text for text in with_setting(tiny_run, **setting)]
    error = assert_one_error(gpt2_pile, argv, message, monkeypatch, capsys)
    assert error.startswith("gpt2_pile.py: error: ")
    assert not (tmp_path / "run").exists()


def test_a_budget_below_the_floor_ends_with_status_2(
    tiny_run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert command_line(gpt2_pile, with_setting(tiny_run, method="adacc", memory_budget="0.001"), monkeypatch) == 2
    assert "memory_budget" in capsys.readouterr().err.splitlines()[-1]


def test_the_script_starts_from_any_folder(tmp_path: Path):
    process = subprocess.run(
        [sys.executable, RECIPE, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "--memory_budget" in process.stdout
    assert "--per_device_train_batch_size" in process.stdout
