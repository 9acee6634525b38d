"""Predicted and measured peaks of tiny models: the error is within the tolerance, and the peak never above the
budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adacc_hf.eval.repository import peak_accuracy
from adacc_hf.eval.repository.peak_accuracy import Measurement, PairsFamily, summary
from adacc_hf.eval.trials.families import Size, in_precision

# The model is large enough for activations to be compressed. Activations, predicted to the byte, outweigh autocast's
# cache of weights, which has only an upper bound.
TINY = Size(width=64, layers=3, heads=2, batch=6, tokens=128)


@pytest.mark.parametrize(
    "case",
    [
        "gpt2 sdpa bf16",
        "gpt2 eager fp32",
        "gpt2 eager bf16",
        "t5 sdpa bf16",
        "bert eager fp32",
        "llama sdpa fp32",
        "pairs sdpa bf16",
    ],
)
def test_peaks_are_as_predicted(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, attention, precision = case.split()
    output = tmp_path / "peaks.json"
    options = ["--family", family, "--attention", attention, "--precision", precision, "--budgets", "2"]
    assert peak_accuracy.main([*options, "--output", str(output)], TINY) == 0
    points = json.loads(output.read_text())["train_info"]["points"]
    peaks = points[f"{family}, {attention}, {precision}"]["peaks"]
    assert [(peak["family"], peak["within_budget"]) for peak in peaks] == [(family, True)] * 2
    assert peaks[0]["budget_bytes"] < peaks[1]["budget_bytes"]
    assert f"| {family}, {attention}, {precision}" in capsys.readouterr().out


def test_a_peak_above_its_budget_or_off_its_prediction_is_bad() -> None:
    good = Measurement(
        family="gpt2",
        attention="sdpa",
        precision="fp32",
        budget_bytes=100,
        predicted_bytes=99,
        measured_bytes=99,
        first_bytes=99,
    )
    assert good.is_good("cpu")
    over = replace(good, measured_bytes=101)
    assert not over.is_good("cpu")
    assert over.is_good("cuda")  # the GPU's allocator rounds
    assert not replace(good, measured_bytes=90).is_good("cuda")
    assert replace(good, first_bytes=101).is_good("cpu")
    assert not replace(good, first_bytes=103).is_good("cpu")
    assert "1 above their budget" in summary([good, over])


def test_an_unknown_precision_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="precision='fp8' is unknown: choose from fp32, bf16"),
        in_precision("fp8", "cpu"),
    ):
        pass


@pytest.mark.parametrize("name", peak_accuracy.MODELS)
def test_families_depend_on_the_seed_alone(name: str) -> None:
    weights = [dict(peak_accuracy.MODELS[name].model(TINY, "sdpa", seed=seed).named_parameters()) for seed in (0, 0, 1)]
    matrices = [key for key, weight in weights[0].items() if weight.dim() == 2]
    assert all((weights[0][key] == weights[1][key]).all() for key in matrices)
    assert any((weights[0][key] != weights[2][key]).any() for key in matrices)


TINY = Size(width=32, layers=1, heads=2, batch=3, tokens=12)


def test_the_encoder_is_called_on_beginnings_and_on_ends():
    model = PairsFamily().model(TINY, "eager")
    lengths = []
    model.encoder.register_forward_hook(
        lambda module, args, kwargs, output: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert model(**TINY.example()).loss.requires_grad
    assert lengths == [8, 4]


def test_pairs_that_are_alike_have_a_small_loss():
    model = PairsFamily().model(TINY, "sdpa").eval()
    part = TINY.example()["input_ids"][:, :4]
    equal_parts = model(torch.cat([part, part, part], dim=1))
    distinct_parts = model(torch.cat([part, part, part.roll(1, 0)], dim=1))
    assert equal_parts.loss < distinct_parts.loss
