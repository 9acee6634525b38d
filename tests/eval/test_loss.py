"""Curves of validation loss, their gap to plain training, and the training that yields them."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config

from adacc_hf.eval import loss
from adacc_hf.eval.trials import training
from adacc_hf.eval.trials.isolation import run_here

CURVES = {"none": [2.0, 1.0], "full": [2.0, 1.0], "quantization": [2.2, 0.99]}


def invented_point(function, order: dict, timeout_s: float | None) -> dict:
    curve = [(step + 1, value) for step, value in enumerate(CURVES[order["method"]])]
    return {"status": "measured", "curve": curve, "training_curve": curve}


def test_gaps_by_hand(tmp_path: Path) -> None:
    output = tmp_path / "loss.json"
    assert loss.main(["--methods", *CURVES, "--output", str(output)], invented_point) == 0
    gaps = json.loads(output.read_text())["train_info"]["gap_to_plain"]
    assert gaps["full"] == {"final_percent": 0.0, "largest_percent": 0.0, "mean_drift_percent": 0.0}
    expected = {"final_percent": -1.0, "largest_percent": 10.0, "mean_drift_percent": 4.5}
    assert gaps["quantization"] == pytest.approx(expected)
    assert "0.46 to 0.5 %" in output.with_suffix(".md").read_text()
    assert ">validation loss, gap to plain in %<" in output.with_suffix(".svg").read_text()


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (("--budget", "sheep"), ValueError, "memory_budget='sheep' is not a size"),
        (("--learning-rate", "0"), ValueError, r"--learning-rate=0.0 must be in \(0, 1\]"),
        (("--text", "no-such.txt"), FileNotFoundError, "--text=no-such.txt is not a file"),
    ],
    ids=["budget", "learning-rate", "text"],
)
def test_bad_settings_are_told_before_training(tmp_path: Path, argv, error, message: str) -> None:
    with pytest.raises(error, match=message):
        loss.main([*argv, "--output", str(tmp_path / "x.json")], invented_point)


def test_text_is_split_into_training_and_validation(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    train, validation = training.read_text(str(path), 8)
    assert (train.tolist(), validation.tolist()) == (list(range(180)), list(range(180, 200)))
    with pytest.raises(ValueError, match="has 200 bytes, too few for --tokens=64"):
        training.read_text(str(path), 64)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("model")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=256)
    config.bos_token_id = config.eos_token_id = None
    config.save_pretrained(path)
    return {"preset": str(path), "batch": 4, "tokens": 64}


def curve_of(subject: dict, method: str, folder: Path, **overrides) -> dict:
    options = {"steps": 6, "eval_every": 2, "eval_sequences": 4, "learning_rate": 1e-3, "budget": 0.5} | overrides
    order = {"subject": subject, "method": method, "folder": str(folder / method), **options}
    return run_here(training.train_curve, order)


def test_lossless_methods_train_alike(subject: dict, tmp_path: Path) -> None:
    plain, full = (curve_of(subject, name, tmp_path) for name in ("none", "full"))
    assert [step for step, _ in plain["curve"]] == [2, 4, 6]
    assert plain["curve"] == full["curve"]
    assert plain["curve"][-1][1] < plain["curve"][0][1]


def test_a_cut_training_goes_on_from_its_checkpoint(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVED_AFTER_STEPS", 2)
    uninterrupted = curve_of(subject, "none", tmp_path / "whole")
    real, calls = training.Trainer.evaluate, []

    def evaluate(self, *args, **kwargs):
        calls.append(self.state.global_step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(training.Trainer, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        curve_of(subject, "none", tmp_path)
    again = curve_of(subject, "none", tmp_path)
    assert calls == [2, 4, 6, 6]
    assert again["curve"] == uninterrupted["curve"]
