import json
import sys
from pathlib import Path

import gpt2_pile
import pytest
import torch
from recipe_runs import with_setting
from transformers import AutoModelForCausalLM, AutoTokenizer

from adacc_hf import Policy
from adacc_hf.artifacts.files import PROFILE_FILE

WITH_CALLBACK = ("quantization", "adacc", "adacc_no_outlier", "adacc_compact")


@pytest.mark.parametrize("method", ["none", "full", "compact", *WITH_CALLBACK])
def test_every_method_trains_and_leaves_its_results(method, tiny_run, tmp_path, capsys):
    metrics = gpt2_pile.main(with_setting(tiny_run, method=method, memory_budget="0.5", report=False))
    run = tmp_path / "run"
    assert 5.0 < metrics["eval_loss"] < 6.5  # ln 290 = 5.7 is chance level; after four steps the loss is still close
    assert metrics["steps"] == 4
    assert AutoModelForCausalLM.from_pretrained(run).config.vocab_size == len(AutoTokenizer.from_pretrained(run))
    assert json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    assert (run / "adacc_policy.json").is_file() == (method in WITH_CALLBACK)
    if method == "quantization":
        assert Policy.load(run / "adacc_policy.json").action_counts()["recompute"] == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f", {method}: 4 steps" in line]
    assert f"validation loss {metrics['eval_loss']:.3f}" in line


def test_training_starts_from_given_weights_that_fit_the_tokenizer(tiny_run, tmp_path):
    argv = with_setting(tiny_run, method="none", report=False)
    gpt2_pile.main(argv)
    given = tmp_path / "run"
    argv = with_setting(argv, model=given, from_pretrained=True)
    run = gpt2_pile.prepare_run(with_setting(argv, tokenizer=given))
    weights = AutoModelForCausalLM.from_pretrained(given).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.fresh_model().state_dict().items())
    with pytest.raises(ValueError, match="--tokenizer has 296 tokens but"):
        gpt2_pile.prepare_run(with_setting(argv, vocab_size=400)).fresh_model()
    with pytest.raises(ValueError, match="--model=demo is a preset"):
        gpt2_pile.prepare_run(with_setting(argv, model="demo"))


@pytest.mark.parametrize("method", ["none", "adacc"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(method: str, tiny_run: list[str], tmp_path: Path):
    argv = with_setting(tiny_run, method=method, memory_budget="0.5", report=False, save_steps=3)
    uninterrupted = gpt2_pile.main(argv)
    resumed = gpt2_pile.main(
        with_setting(argv, output_dir=tmp_path / "resumed", resume_from_checkpoint=tmp_path / "run" / "checkpoint-3")
    )
    assert resumed["eval_loss"] == uninterrupted["eval_loss"]


def test_a_resumed_run_reports_without_the_profile_of_its_checkpoint(tiny_run, tmp_path):
    """A resumed run records its first step anew."""
    pytest.importorskip("matplotlib")
    checkpoint = tmp_path / "run" / "checkpoint-4"
    argv = with_setting(tiny_run, method="adacc", memory_budget="0.5")
    gpt2_pile.main(with_setting(argv, report=False))
    (checkpoint / PROFILE_FILE).unlink()
    gpt2_pile.main(with_setting(argv, output_dir=tmp_path / "resumed", resume_from_checkpoint=checkpoint, max_steps=5))
    assert (tmp_path / "resumed" / "report.md").exists()


def test_all_models_of_a_run_have_equal_weights(tiny_run: list[str]):
    run = gpt2_pile.prepare_run(with_setting(tiny_run, method="none"))
    first, second = (run.fresh_model().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert run.seq_len == 64


def test_a_setting_beats_the_default_of_the_model():
    args, training = gpt2_pile.parse_arguments([])
    assert (args.model, args.vocab_size, args.memory_budget) == ("demo", 512, "0.5")
    assert training.output_dir == "runs/demo-adacc"
    assert gpt2_pile.parse_arguments(["--max_steps", "7"])[1].max_steps == 7
    _, training = gpt2_pile.parse_arguments(["--model", "org/name", "--method", "full"])
    assert (training.max_steps, training.output_dir) == (10_000, "runs/name-full")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dataset": "gone.jsonl"}, "gone.jsonl"),
        ({"dataset": "no-such/pile"}, "no-such/pile"),
        ({"model": "no-such/model"}, "--model=no-such/model is not a preset (demo"),
        ({"tokenizer": "no-such/tokenizer"}, "--tokenizer=no-such/tokenizer could not be loaded"),
        ({"seq_len": 65}, "--seq_len=65 is outside its range (2 to 64"),
        ({"vocab_size": 100}, "--vocab_size=100 is below 257"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"compact_rank": "most"}, "--compact_rank=most must be a fraction"),
        ({"no_such_setting": 1}, "--no_such_setting"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_ends_with_one_message_and_status_2(setting, message, tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt2_pile.py", *with_setting(tiny_run, **setting)])
    assert gpt2_pile.exit_status() == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("gpt2_pile.py: error: ")
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
