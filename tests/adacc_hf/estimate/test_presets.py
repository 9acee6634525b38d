"""Presets: their numbers of parameters, and models that are not known."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from adacc_hf.estimate.model_presets import build_model, load_config
from adacc_hf.estimate.presets import PRESETS, check_model


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("demo", 4_935_680),
        ("gpt2-117m", 124_439_808),  # GPT-2 small and medium, as published
        ("gpt2-345m", 354_823_168),
        ("gpt2-4.7b", 4_688_987_136),
        ("llama-1b", 1_235_814_400),  # Llama 3.2 1B and T5 Base, as published
        ("t5-base", 222_903_552),
    ],
)
def test_presets_have_their_parameter_counts(name: str, num_parameters: int):
    with torch.device("meta"):
        model = build_model(name, load_config(name), PRESETS[name]["vocab_size"], 0, "sdpa", pretrained=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt2" in name or name == "demo"])
def test_gpt_presets_train_with_dropout(name: str):
    config = load_config(name)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1


def test_a_preset_and_a_folder_are_known(tmp_path: Path):
    GPT2Config().save_pretrained(tmp_path)
    check_model("llama3-8b")
    check_model(str(tmp_path))
