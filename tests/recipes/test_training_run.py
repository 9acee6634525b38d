"""One training run: settings that are refused before data is read, the model, and what is written."""

from pathlib import Path

import pytest
import torch
from recipe_arguments import RecipeArguments, parse_arguments
from training_run import compact_optimizer, prepare_run, train_once

from adacc_hf import Policy
from adacc_hf.artifacts.files import POLICY_FILE
from adacc_hf.compact import CompactFactory


def arguments(argv: list[str], **settings: object) -> RecipeArguments:
    """Return the parsed settings of `argv`, with further settings."""
    return parse_arguments([*argv, *(text for name, value in settings.items() for text in (f"--{name}", str(value)))])


@pytest.mark.parametrize("method", ["compact", "adacc_compact"])
def test_compact_has_an_optimizer_of_its_own(method: str):
    factory, settings = compact_optimizer(method, "0.25", lr=0.01)
    assert factory is CompactFactory
    assert settings == {"rank": 0.25, "lr": 0.01}
    assert type(compact_optimizer(method, "8")[1]["rank"]) is int


@pytest.mark.parametrize("method", ["none", "full", "quantization", "adacc"])
def test_other_methods_have_the_trainers_optimizer(method: str):
    assert compact_optimizer(method, "no rank") is None


def test_all_models_of_a_run_have_equal_weights(tiny_run: list[str]):
    run = prepare_run(arguments(tiny_run, method="none"))
    first, second = (run.fresh_model().state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert run.seq_len == 64


def test_a_run_that_ends_before_its_policy_has_no_callback(tiny_run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("adacc_hf.adapt.training_loop.TrainingLoop.num_unrecorded_steps", 1)
    run = prepare_run(arguments(tiny_run, method="adacc", memory_budget="0.5", max_steps=1))
    finished = train_once(run, "adacc", "0.5", str(tmp_path / "run"))
    assert finished.callback is None
    assert "training ended after 1 steps, before a policy was set: raise --max_steps" in caplog.text
    assert not (tmp_path / "run" / POLICY_FILE).exists()


def test_a_run_leaves_its_policy_and_metrics(tiny_run: list[str], tmp_path: Path):
    run = prepare_run(arguments(tiny_run, method="adacc", memory_budget="0.5"))
    finished = train_once(run, "adacc", "0.5", str(tmp_path / "elsewhere"))
    assert Policy.load(tmp_path / "elsewhere" / POLICY_FILE) == finished.callback.policy
    assert finished.metrics["steps"] == 4
    assert finished.metrics.keys() >= {"final_train_loss", "eval_loss", "train_samples_per_second"}
    assert (tmp_path / "elsewhere" / "all_results.json").is_file()
    assert run.args.training.output_dir == str(tmp_path / "run"), "the settings of the run stay"
